"""Compare our five all_reduce algorithms with dist.all_reduce: results, bytes and steps.

    torchrun --standalone --nproc_per_node=2 collectives/compare_all_reduce.py
    torchrun --standalone --nproc_per_node=4 collectives/compare_all_reduce.py
    torchrun --standalone --nproc_per_node=3 collectives/compare_all_reduce.py --numel 1000003

The algorithms themselves are in all_reduce_algorithms.py. Look at

1. the ring, step by step: a number says how many ranks' values are added up in an element. After
   N-1 steps (reduce-scatter) each of the N ranks holds one finished chunk; N-1 more steps
   (all-gather) pass the finished chunks around.
2. the algorithms: each gives dist.all_reduce's sum, with the same bits on every rank. The steps of
   the critical path determine the time of a small tensor, its bytes that of a large one.
3. bytes and steps that every rank sent, counted while sending, next to the formula.
"""

import torch
import torch.distributed as dist
from all_reduce_algorithms import ALGORITHMS, ring
from all_reduce_traffic import critical_path, expected_traffic
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from runtime import Worker, distributed_worker
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show_ring(worker)
        compare(args.numel, worker)


def show_ring(worker: Worker) -> None:
    size, rows = worker.world_size, []
    for step in range(2 * size - 1):
        tensor = torch.ones(size, dtype=torch.int64, device=worker.device)
        ring(tensor, steps=step)
        views = [None] * size
        dist.all_gather_object(views, " ".join(map(str, tensor.tolist())))
        rows.append([step, *views])
    if worker.is_main:
        print("\n1. The ring: how many ranks' values are in each element, after each step")
        print_table(["step", *(f"rank {rank}" for rank in range(size))], rows)


def compare(numel: int, worker: Worker) -> None:
    torch.manual_seed(worker.rank)
    own = torch.randn(numel, device=worker.device)
    expected = own.clone()
    dist.all_reduce(expected)
    summary, details = [], []
    for name, algorithm in ALGORITHMS.items():
        result = own.clone()
        sent = algorithm(result)
        difference = (result - expected).abs().max().item() if numel else 0.0
        of_rank_0 = result.clone()
        dist.broadcast(of_rank_0, src=0)
        mine = {
            "sent": sent,
            "difference": difference,
            "same bits": torch.equal(of_rank_0, result),
        }
        ranks = [None] * worker.world_size
        dist.all_gather_object(ranks, mine)

        path = critical_path(name, numel, own.element_size(), worker.world_size)
        bytes_in_turn = path.bytes / own.nbytes if numel else 0.0
        max_difference = max(rank["difference"] for rank in ranks)
        same_bits = "yes" if all(rank["same bits"] for rank in ranks) else "NO"
        summary.append(
            [name, path.steps, f"{bytes_in_turn:.3f}", f"{max_difference:.1e}", same_bits]
        )
        for rank, seen in enumerate(ranks):
            sent = seen["sent"]
            formula = expected_traffic(name, numel, own.element_size(), worker.world_size, rank)
            details.append([name, rank, sent.steps, formula.steps, sent.bytes, formula.bytes])
    if worker.is_main:
        print(f"\n2. The algorithms, for {numel:,} float32: S = {own.nbytes:,} bytes.")
        print("Critical path: the longest chain of transfers that wait for each other, by formula")
        header = ["critical path: steps", "bytes / S", "difference from all_reduce", "same bits"]
        print_table(["algorithm", *header], summary)
        print("\n3. What each rank sent: counted, and by formula")
        print_table(["algorithm", "rank", "steps", "formula", "bytes", "formula"], details)


def parse_args():
    parser = ArgumentParser(description="all_reduce from point-to-point operations, five ways.")
    add = parser.add_argument
    add("--numel", type=at_least(0), default=100_003, help="float32 elements per rank")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
