"""A model split over two devices inside each replica, and the replicas under DDP.

    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_with_model_parallel.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_with_model_parallel.py --device cuda
    python ddp_basics/ddp_with_model_parallel.py                              # one replica

For a model that one GPU cannot hold: one GPU holds the first half, another GPU the second, and the
activations are copied between them. Rank r takes the GPUs 2r and 2r + 1 of its node, so --device
cuda needs two GPUs per rank. Without GPUs both halves are on the CPU.

Look at the devices of the halves, and at the differences to the unsplit model in one process: of
the global batch's gradients, and of the parameters after --steps steps. The table does not show
that one half waits while the other computes. Pipeline parallelism fills that time; fully_shard
needs no split at all.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from agreement import id_of
from arguments import DEVICES, ArgumentParser, UserError, at_least
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    # "cpu" gives us the ranks and a Gloo group for the report. "cuda" would take one GPU per rank
    # and bind NCCL to it; this script takes two, and makes a group for them below.
    with distributed_worker("cpu") as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        devices = choose_devices(args.device, worker)
        kind = devices[0].type
        backend = choose_backend(kind)
        # Bound to no device: NCCL connects each of a rank's two GPUs at its first use.
        group = None if kind == "cpu" else dist.new_group(backend=backend)
        if worker.is_main:
            print(f"the halves of {worker.world_size} rank(s) on {kind}, {backend}", flush=True)
        train(devices, group, args, worker)


def choose_devices(device: str, worker: Worker) -> list[torch.device]:
    """The devices of this rank's two halves. All ranks raise `UserError` if a rank lacks them."""
    own = own_devices(device, worker.local_rank)
    of_ranks = [None] * worker.world_size
    dist.all_gather_object(of_ranks, (own, [id_of(torch.device(name)) for name in own]))
    pairs, taken = [pair for pair, _ in of_ranks], set()
    for rank, (pair, ids) in enumerate(of_ranks):
        if not pair or taken.intersection(ids):
            raise UserError(
                f"rank {rank} needs two devices of its own: start one rank per two devices of a "
                "node, or pass --device cpu"
            )
        taken.update(filter(None, ids))  # "" on a CPU
    kinds = {torch.device(pair[0]).type for pair in pairs}
    if len(kinds) > 1:
        raise UserError(f"some ranks are on {' and some on '.join(sorted(kinds))}")
    devices = [torch.device(name) for name in pairs[worker.rank]]
    if devices[0].type != "cpu":
        torch.accelerator.set_device_index(devices[0].index)  # else all ranks would use GPU 0, too
    return devices


def choose_backend(kind: str) -> str:
    """Since torch 2.15 `nccl` binds a group to one GPU per rank; `nccl-legacy` takes several."""
    if kind == "cuda" and dist.is_backend_available("nccl-legacy"):
        return "nccl-legacy"
    return dist.get_default_backend_for_device(kind)


def own_devices(device: str, local_rank: int) -> list[str]:
    """Names of this rank's two devices; [] if its node has too few."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "cpu" or (device == "auto" and not accelerator):
        return ["cpu", "cpu"]
    count = torch.accelerator.device_count()
    # The global rank would be wrong on the second node. If a launcher shows each process only its
    # own two devices (Slurm: --gpus-per-task=2), they have the numbers 0 and 1 in every process.
    first = 2 * local_rank if count > 2 else 0
    if first + 1 >= count:
        return []
    return [f"{accelerator.type}:{first}", f"{accelerator.type}:{first + 1}"]


class TwoHalves(nn.Module):
    """SmallCNN split in two. Images (batch, 1, 8, 8) -> logits (batch, 10) on the second device."""

    def __init__(self, devices: Sequence[torch.device]):
        super().__init__()
        layers = SmallCNN().net
        self.devices = devices
        self.first = layers[:8].to(devices[0])
        self.second = layers[8:].to(devices[1])

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1]))  # backward sends the gradient the other way


def train(devices, group, args, worker: Worker) -> None:
    torch.manual_seed(0)
    model = TwoHalves(devices)
    # device_ids=None: DDP moves no inputs and accepts several devices. It makes buckets for each
    # device, and averages each with the bucket of the same half on the other ranks.
    ddp_model = DistributedDataParallel(model, device_ids=None, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    torch.manual_seed(0)
    reference = SmallCNN()  # unsplit, on the CPU, on the global batch
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)

    images, labels = load_dataset("digits")[0][:]
    max_diff = {"first": 0.0, "second": 0.0}  # of the gradients of each half
    for step in range(args.steps):
        start = step * args.batch_size
        global_batch = torch.arange(start, start + args.batch_size) % len(images)
        local_batch = global_batch[worker.rank :: worker.world_size]
        optimizer.zero_grad()
        logits = ddp_model(images[local_batch])
        F.cross_entropy(logits, labels[local_batch].to(logits.device)).backward()
        reference_optimizer.zero_grad()
        F.cross_entropy(reference(images[global_batch]), labels[global_batch]).backward()
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        for (name, param), expected in pairs:
            half = name.split(".")[0]
            diff = (param.grad.cpu() - expected.grad).abs().max().item()
            max_diff[half] = max(max_diff[half], diff)
        optimizer.step()
        reference_optimizer.step()
    report(model, reference, max_diff, args, worker)


def report(model: TwoHalves, reference: SmallCNN, max_diff: dict, args, worker: Worker) -> None:
    rows = []
    for half in ("first", "second"):
        params = list(getattr(model, half).parameters())
        devices = ", ".join({str(p.device) for p in params})
        rows.append((half, devices, sum(p.numel() for p in params), max_diff[half]))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    parameter_diff = max((p.detach().cpu() - q.detach()).abs().max().item() for p, q in pairs)
    results = [None] * worker.world_size
    dist.all_gather_object(results, (rows, parameter_diff))
    if not worker.is_main:
        return
    print("rank  half    lives on  parameters  max difference of gradients")
    for rank, (rows, _) in enumerate(results):
        for half, devices, count, gradient_diff in rows:
            print(f"{rank:4}  {half:6}  {devices:8}  {count:10,}  {gradient_diff:27.1e}")
    parameter_diff = max(diff for _, diff in results)
    print(f"max difference of parameters after {args.steps} steps: {parameter_diff:.1e}")


def parse_args():
    parser = ArgumentParser(description="DDP over replicas that live on two devices each.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=5, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=48, help="images per global batch (default: 48)")
    add("--device", choices=DEVICES, default="auto", help="cuda: two GPUs per rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
