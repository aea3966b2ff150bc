"""A few cases of an equivalence matrix, on the backend that run_on.py names: see SLICES.

Rank 0 saves what came out, next to what one process has computed with none.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist

SLICES = {  # the worker of the matrix -> ranks, cases
    "equivalence": (2, ["sgd, accumulate", "adamw", "sgd, tied"]),
    "fsdp_equivalence": (2, ["sgd", "sgd, keep gathered", "sgd, tied"]),
    "gpt_equivalence": (
        4,
        [
            ("--dp-shard 2 --tp 2", "clip"),
            ("--pp 2 --dp-shard 2", "clip"),
            ("--pp 2 --accumulate 4 --tp 2 --sequence-parallel --loss-parallel", "clip"),
        ],
    ),
}


def pairs(module, case, worker) -> tuple:
    """Results of this case: of one process, and of the ranks."""
    if isinstance(case, tuple):  # the mesh, and what changes the result
        return [module.one_process(case[1])], [module.on_mesh(*case, worker)]
    options = module.CASES[case]
    return module.reference(**options), module.run_case(worker, **options)


def main() -> None:
    matrix, output = sys.argv[1:]
    module = importlib.import_module(matrix)
    with module.worker_of_test(gpu_per_rank=True) as worker:  # the pipelines do
        found = {case: pairs(module, case, worker) for case in SLICES[matrix][1]}
        if worker.is_main:
            torch.save({"backend": dist.get_backend(), "found": found}, output)


if __name__ == "__main__":
    main()
