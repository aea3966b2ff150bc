"""A tied embedding on the first and the last stage: what each rank saw; saves it on rank 0.

Started by test_parallel_basics_tied.py with 2 or 3 ranks: a GPT, and the smallest model, which is
an embedding (10 x 4) on the first stage and the head on the last.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import tied_stages
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare_pipelines import gather
from model import GPT, initialize
from torch import nn
from workers.place import on_cpu, worker_of_test

ARGS = SimpleNamespace(
    steps=4, batch_size=6, microbatches=3, length=7, layers=3, dim=16, vocab_size=128, seed=3
)
SMALLEST = SimpleNamespace(**vars(ARGS) | {"steps": 1, "layers": 0, "dim": 4, "vocab_size": 10})


class SmallestStage(nn.Module):
    def __init__(self, stage: int, stages: int):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.token_embedding = nn.Embedding(10, 4)
        else:
            self.head = nn.Linear(4, 10, bias=False)

    def forward(self, x):
        return self.token_embedding(x) if self.is_first else self.head(x)


def smallest(worker) -> dict:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randint(10, (2, 6, 7), generator=generator).to(worker.device)
    tied_stages.gpt_stage = lambda config, stage, stages, *_: SmallestStage(stage, stages).to(
        worker.device
    )
    tied_stages.text_batch = lambda *_: (x, y)
    torch.manual_seed(worker.rank)  # the broadcast is what makes the copies equal
    matrix = SmallestStage(worker.rank, 2).state_dict()
    torch.manual_seed(worker.rank)
    args = SimpleNamespace(**vars(SMALLEST), optimizer="sgd", output_dir=None)
    return {"start": matrix, "steps": tied_stages.train(args, worker), "batches": [(x, y)]}


def main(output: Path) -> None:
    found = {}
    with worker_of_test(gpu_per_rank=True) as worker:
        config = tied_stages.make_config(ARGS, tied=True)
        found["start"] = initialize(GPT(config), ARGS.seed).state_dict()
        found["batches"] = [
            tied_stages.batch(ARGS, step, worker.device) for step in range(ARGS.steps)
        ]
        folder = output.parent / f"saved by {worker.world_size}"
        for optimizer in ("sgd", "adamw"):
            args = SimpleNamespace(**vars(ARGS), optimizer=optimizer, output_dir=folder / optimizer)
            found[optimizer] = gather(on_cpu(tied_stages.train(args, worker)))
        found["loaded"] = gather(on_cpu(loaded(folder / "adamw", worker)))
        metadata = dcp.FileSystemReader(folder / "adamw").read_metadata()
        found["stored"] = {
            name: tuple(tensor.size) for name, tensor in metadata.state_dict_metadata.items()
        }
        if worker.world_size == 2:
            found["smallest"] = gather(on_cpu(smallest(worker)))
        if worker.is_main:
            torch.save(found, output)
        dist.barrier()


def loaded(folder: Path, worker) -> dict:
    """The state of a stage with other initial values, after it has loaded the checkpoint."""
    config = tied_stages.make_config(ARGS)
    model = tied_stages.gpt_stage(config, worker.rank, worker.world_size, 99, worker.device)
    dcp.load(tied_stages.named_state(model), checkpoint_id=folder)
    return model.state_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
