"""Two ranks continue from a file that only rank 0 can read: what is sent to the other, and how.

Arguments: the folder of the checkpoints (given to rank 0), where to write what was seen.
"""

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ddp_basics"))

import checkpoint
import torch
import torch.distributed as dist
from config import Settings
from model import SmallCNN
from optimizer import make_optimizer
from runtime import distributed_worker


def main(folder: str, output: str) -> None:
    with distributed_worker("cpu") as worker:
        model = SmallCNN()
        optimizer = make_optimizer(model, Settings())
        if worker.rank == 1:  # another node, without the disk
            folder = str(Path(output).with_name("nothing"))
        objects = []
        send = dist.broadcast_object_list

        def note(box, *args, **kwargs):
            objects.append(len(pickle.dumps(box)))
            return send(box, *args, **kwargs)

        dist.broadcast_object_list = note
        parts = {"model": model, "optimizer": optimizer}
        step, run = checkpoint.resume(Path(folder), parts, {}, worker)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found = [None] * 2
        dist.all_gather_object(found, {"step": step, "run": run, "objects": objects, **state})
        if worker.is_main:
            torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
