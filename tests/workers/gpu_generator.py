"""Save a checkpoint, draw numbers on the GPU, load the checkpoint, draw again.

gpu_generator.py DIRECTORY FOLDER: the checkpoint.py of this example directory writes to FOLDER.
Each rank prints its numbers before and after as one line of JSON.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / sys.argv[1]))

from checkpoint import resume, save_checkpoint
from runtime import Worker, distributed_worker


def main() -> None:
    with distributed_worker("cuda") as worker:
        print(json.dumps(draw_twice(worker, Path(sys.argv[2]))), flush=True)


def draw_twice(worker: Worker, folder: Path) -> tuple[list[float], list[float]]:
    torch.manual_seed(worker.rank)
    model = torch.nn.Linear(2, 2, device=worker.device)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    save_checkpoint(folder, parts, 1, {}, worker)
    before = torch.rand(3, device=worker.device).tolist()
    resume(folder, parts, {}, worker)
    return before, torch.rand(3, device=worker.device).tolist()


if __name__ == "__main__":
    main()
