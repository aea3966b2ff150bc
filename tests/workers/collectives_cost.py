"""Run every case of bandwidth.py, and the orders of async_work.py, for worlds of 2 to 4 ranks.

Started by test_collectives_cost.py under torchrun with 4 ranks. Smaller worlds are groups of the
first ranks. Each rank saves what it saw; the tests compare.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collectives"))

import async_work
import bandwidth
import torch
import torch.distributed as dist
from bandwidth_cases import OPERATIONS, expected_result, first_error, pattern, prepare
from costs import time_calls
from runtime import distributed_worker

SIZES = (1, 5, 1000)  # elements per rank
CPU = torch.device("cpu")


def run_cases(worker, groups) -> dict:
    """(operation, world, elements) -> result, what first_error() says, and of a spoiled result."""
    results = {}
    for world, group in groups.items():
        for operation in OPERATIONS:
            for size in SIZES:
                if worker.rank >= world:
                    continue
                x = pattern(worker.rank, size * world)
                case = prepare(operation, x, torch.zeros_like(x), group)
                case.run()
                expected = expected_result(operation, len(x), group=group)
                result, error = case.result.clone(), first_error(case.result, expected)
                case.result[-1] += 1
                of_spoiled = first_error(case.result, expected)
                results[operation, world, size] = result, error, of_spoiled
    return results


def overlap_is_real(order: str) -> list[bool]:
    """For each bucket but the first: did the previous transfer complete while this one computed?

    Here the computation waits until that transfer is complete, at most 20 s. A transfer that needed
    a call of wait() would never complete.
    """
    works, seen, real = [], [], dist.all_reduce

    def noted(*args, **options):
        works.append(real(*args, **options))
        return works[-1]

    def compute() -> None:
        deadline = time.monotonic() + 20
        while works and not works[-1].is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(not works or works[-1].is_completed())

    dist.all_reduce = noted
    try:
        async_work.run_order(order, [torch.zeros(1000) for _ in range(4)], compute)
    finally:
        dist.all_reduce = real
    return seen


def computes_ahead(worker, mark: Path) -> bool:
    """Whether rank 0 computes its last bucket although no transfer can be complete.

    No transfer can be complete, because the last rank starts only when rank 0 has left a mark in
    its last bucket (or after 20 s, so that a wrong order does not hang).
    """
    computed = []

    def compute() -> None:
        computed.append(None)
        if worker.rank == 0 and len(computed) == 4:
            mark.touch()

    deadline = time.monotonic() + 20
    while worker.rank == 3 and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    ahead = mark.exists()
    async_work.run_order("overlapped", [torch.zeros(1000) for _ in range(4)], compute)
    return ahead


def main() -> None:
    with distributed_worker("cpu") as worker:
        groups = {world: dist.new_group(range(world), backend="gloo") for world in (2, 3, 4)}
        saved = {"cases": run_cases(worker, groups)}
        saved["handle"] = async_work.try_handle(CPU, groups[4])
        saved["overlap"] = {order: overlap_is_real(order) for order in ("sequential", "overlapped")}
        saved["ahead"] = computes_ahead(worker, Path(sys.argv[1], "mark"))
        tensors = [torch.full((1000,), float(worker.rank)) for _ in range(3)]
        async_work.run_order("overlapped", tensors, lambda: None)
        saved["sums"] = [tensor.clone() for tensor in tensors]
        saved["measured"] = async_work.measure_overlap(tensors, lambda: None, repeats=3)
        # Rank 1 is slow, and every rank must get its time.
        slow = lambda: time.sleep(0.03 if worker.rank == 1 else 0)  # noqa: E731
        saved["slow"] = time_calls(slow, 2, 3, CPU)
        limits = bandwidth.measure_limits(4096, 3, worker)
        saved["limits"] = limits
        torch.save(saved, f"{sys.argv[1]}/{worker.rank}.pt")


if __name__ == "__main__":
    main()
