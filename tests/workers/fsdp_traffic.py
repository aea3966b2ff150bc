"""Save and resume a model of 4 MB on all ranks; print the sizes of the objects that are sent."""

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import torch
import torch.distributed as dist
from checkpoint import resume, save_checkpoint
from runtime import Worker, distributed_worker
from torch.distributed.fsdp import fully_shard

MODEL_BYTES = 4 * 1000 * 1000


def save_and_resume(folder: Path, worker: Worker) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts, run = {"model": model, "optimizer": optimizer}, {"lr": 0.1}
    sizes = []

    def noted(send):
        def send_and_note(*args, **options):
            values = [*args, *options.values()]
            sent = [value for value in values if not isinstance(value, dist.ProcessGroup)]
            sizes.append(len(pickle.dumps(sent)))
            return send(*args, **options)

        return send_and_note

    dist.all_gather_object = noted(dist.all_gather_object)
    dist.broadcast_object_list = noted(dist.broadcast_object_list)
    before = model.weight.to_local().clone()
    save_checkpoint(folder, parts, 7, run, worker)
    with torch.no_grad():
        model.weight.zero_()
    step, saved_run = resume(folder, parts, run, worker)
    same = (step, saved_run) == (7, run) and torch.equal(model.weight.to_local(), before)
    if worker.is_main:
        print(f"objects of {sizes} bytes")
        print(f"the parameters are back: {same}")


if __name__ == "__main__":
    with distributed_worker("cpu") as worker:
        save_and_resume(Path(sys.argv[1]), worker)
