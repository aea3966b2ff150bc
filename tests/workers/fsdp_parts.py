"""Save a sharded run with two optimizers, one of which counts in numbers, and continue it.

    fsdp_parts.py PHASES FOLDER

PHASES: functions below, by commas. What each rank has found goes to FOLDER/PHASE_RANKS.pt.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.counting_sgd
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fsdp_basics"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import UserError
from checkpoint import resume, save_checkpoint, start_save
from runtime import distributed_worker
from torch.distributed.fsdp import fully_shard
from workers.counting_sgd import HALF, STEPS, CountingSGD, build, data


def train(worker, folder: Path, stop: int = STEPS, form: str = "sync", frozen: bool = False):
    """Continue what is in `folder` up to step `stop`, save there, and return what was seen.

    frozen: the first layer is, and the optimizers are of the trainable parameters only.
    """
    torch.manual_seed(0 if stop == HALF else 99)  # what continues begins with other numbers
    model = build()
    model[0].requires_grad_(not frozen)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = {
        "model": model,
        "optimizer": torch.optim.AdamW([p for p in trained if p.dim() > 1], lr=0.01),
        "optimizer_vectors": CountingSGD([p for p in trained if p.dim() == 1], lr=0.1),
    }
    step, _ = resume(folder, parts, {}, worker)
    x, y = data()
    own = slice(worker.rank, None, worker.world_size)
    losses, gradients = [], []
    for _ in range(step, stop):
        model.zero_grad()
        loss = F.cross_entropy(model(x[own]), y[own])
        loss.backward()
        gradients.append({n: full(p.grad) for n, p in model.named_parameters() if p.requires_grad})
        parts["optimizer"].step()
        parts["optimizer_vectors"].step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / worker.world_size)
    if form == "async":
        group = dist.new_group(backend="gloo")
        finish = start_save(folder, parts, stop, {}, worker, group=group)
        vectors = parts["optimizer_vectors"]
        for values in (*vectors.param_groups, *vectors.state.values()):
            values["k"] = -1  # as if training had gone on
        finish()
    else:
        save_checkpoint(folder, parts, stop, {}, worker)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        "step": step,
        "losses": losses,
        "gradients": gradients,
        "last": {name: full(tensor.detach()) for name, tensor in named},
    }


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def halves(worker, folder: Path) -> dict:
    found = {}
    for form in ("sync", "async"):
        found[form] = [train(worker, folder / f"{form} 2", HALF, form)]
        found[form].append(train(worker, copy_of(folder / f"{form} 2", worker)))
    return found


def others(worker, folder: Path) -> dict:
    """The second half on another number of ranks."""
    return {
        form: train(worker, copy_of(folder / f"{form} 2", worker)) for form in ("sync", "async")
    }


def frozen(worker, folder: Path) -> dict:
    return train(worker, copy_of(folder / "sync 2", worker, "frozen"), frozen=True)


def copy_of(folder: Path, worker, name: str = "copy") -> Path:
    copy = folder.with_name(f"{folder.name} {name} on {worker.world_size}")
    if worker.is_main:
        shutil.copytree(folder, copy)
    dist.barrier()
    return copy


class EMA:
    """An average of shards, whose state_dict() has them in a list."""

    def __init__(self, model):
        self.averages = [p.detach().clone() for p in model.parameters()]

    def state_dict(self):
        return {"averages": self.averages}


def refused(worker, folder: Path) -> dict:
    """What a save and a start say; and the files that there are then."""

    class Odd(torch.optim.Optimizer):
        def __init__(self, params, **entries):
            super().__init__(params, entries)

    def cases(model):
        other = fully_shard(build())
        with_list = Odd(model.parameters())
        first = next(model.parameters())
        with_share, with_dot, counting = (Odd(model.parameters()) for _ in range(3))
        with_share.state[first]["mean"] = torch.zeros_like(first.to_local())
        with_dot.state[first]["ema.fast"] = first.detach().clone()
        counting.state_dict = lambda: {"state": {}, "param_groups": [], "calls": 3}
        with_list.state[first]["history"] = [first.detach()]
        return {
            "average": {"ema": EMA(model)},
            "network": {"critic": other},
            "optimizer of a network": {"optimizer_critic": torch.optim.SGD(other.parameters())},
            "list of shards": {"optimizer": with_list},
            "share": {"optimizer": with_share},
            "dot": {"optimizer": with_dot},
            "state dict": {"optimizer": counting},
            "entry": {"optimizer": Odd(model.parameters(), device=torch.device("cpu"))},
            "shard": {"optimizer": Odd(model.parameters(), scale=first.detach())},
            "fine": {"scaler": torch.amp.GradScaler("cpu"), "optimizer": Odd(
                model.parameters(), lr=torch.tensor(0.1), betas=(0.9, 0.5), text="t", none=None,
                nested={"a": [1, 2.0]})},
        }  # fmt: skip

    model = fully_shard(build())
    found = {}
    for name, parts in cases(model).items():
        parts["model"] = model
        place = folder / name
        saved = said_by(lambda p=parts, f=place: save_checkpoint(f, p, 1, {}, worker))
        started = said_by(lambda p=parts, f=place: resume(f, p, {}, worker))
        found[name] = {"said": [saved, started], "files": len(list(place.rglob("*")))}
    return found


def said_by(action) -> str | None:
    try:
        action()
    except UserError as error:
        return str(error)


def main() -> None:
    folder = Path(sys.argv[2])
    with distributed_worker("cpu") as worker:
        for phase in sys.argv[1].split(","):
            found = [None] * worker.world_size
            dist.all_gather_object(found, globals()[phase](worker, folder))
            if worker.is_main:
                torch.save(found, folder / f"{phase}_{worker.world_size}.pt")


if __name__ == "__main__":
    main()
