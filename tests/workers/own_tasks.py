"""Put models of our own through train() of a template, many in one job, and save what came out.

    own_tasks.py DIRECTORY PHASES FOLDER

DIRECTORY: ddp_basics or fsdp_basics. PHASES: functions below, by commas. FOLDER: what each rank has
found goes to FOLDER/PHASE_RANKS.pt, next to the folders of the runs.
"""

import gc
import inspect
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.own_model
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / sys.argv[1]))

import checkpoint
import evaluation
import optimizer as optimizers
import stopping
import torch
import train
from arguments import UserError
from config import Settings
from runtime import distributed_worker
from torch import nn
from workers.own_model import (
    BATCH,
    EPOCHS,
    HALF,
    SAMPLES,
    Odd,
    Own,
    build,
    compute_loss,
    data,
    units,
)

FSDP = sys.argv[1] == "fsdp_basics"
COMMON = {
    "batch_size": BATCH, "epochs": EPOCHS, "log_every": 1, "lr": 1e-2, "warmup": 0.3, "clip": 0.5,
    "weight_decay": 0.1,
}  # fmt: skip
OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "momentum": 0},
    "momentum": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
}


# ---- a run of train(), and what is seen of it


class Run:
    """train.train() with our task; the attributes record the run."""

    def __init__(
        self,
        worker,
        build=build,
        *,
        load=data,
        compute_loss=compute_loss,
        units=units,
        late_from=0,
        stop_after=0,
        momentum=0.9,
        spoil=None,
        step=None,
        **settings,
    ):
        """late_from: the first step that uses all layers. stop_after: a step, as if by SIGTERM.

        spoil: called after each step. step: what to call for train_step.
        """
        self.worker, self.late_from, self.compute_loss = worker, late_from, compute_loss
        self.losses, self.rows, self.built, self.error = [], [], [], None
        self.first, self.momentum, self.spoil = None, momentum, spoil
        self.step, Run.current = step or STEP, self

        def noted_build(settings):
            model = build(settings)
            self.built.append(next(model.parameters()).device.type)
            return model

        train.build_model, train.units = noted_build, units
        train.load_data = lambda settings: (load(), data(15))
        train.make_optimizer, train.train_step = self.make_optimizer, self.train_step
        train.compute_loss = evaluation.compute_loss = self.note_rows
        stopping.StopRequests.agreed = lambda _, step: signal.SIGTERM if step == stop_after else 0
        if not FSDP:
            settings["find_unused_parameters"] = late_from > 0
        if "output_dir" in settings:
            settings["output_dir"].mkdir(exist_ok=True)
        try:
            self.status = int(train.train(Settings(**COMMON | settings), worker))
        except UserError as error:
            self.error = str(error)
            return
        self.last = tensors(self.model)

    def make_optimizer(self, model, settings):
        self.model, self.optimizer = model, optimizers.make_optimizer(model, settings)
        if settings.optimizer == "sgd":
            for group in self.optimizer.param_groups:
                group["momentum"] = self.momentum
        return self.optimizer

    def train_step(self, wrapped, *args):
        if self.first is None:
            self.first = tensors(self.model)
            state = self.optimizer.state_dict()["state"]
            self.first_state = {i: sorted(values) for i, values in state.items()}
            folder = args[3].output_dir  # of the settings
            self.done = steps_saved(folder) if folder else 0
        self.model.late_is_used = self.done >= self.late_from
        loss, norm = self.step(wrapped, *args)
        self.done += 1
        if self.spoil:
            self.spoil(self)
        self.losses.append((float(loss), float(norm)))
        return loss, norm

    def note_rows(self, model, batch):
        self.rows.append((torch.is_grad_enabled(), len(batch[0])))
        return self.compute_loss(model, batch)

    def found(self) -> dict:
        names = ("losses", "first", "last", "first_state", "built", "error", "rows", "status")
        return {name: getattr(self, name, None) for name in names}


STEP = train.train_step


def steps_saved(folder: Path) -> int:
    saves = [int(path.stem.partition("_")[2]) for path in folder.glob("checkpoints/step_????????*")]
    return max(saves, default=0)


def tensors(model) -> dict[str, torch.Tensor]:
    """All parameters and buffers, unsharded, by name."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in named.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


# ---- phases


def halves(worker, folder) -> dict:
    """Runs that stop half way and continue; and whole ones."""
    found = {}
    for name, kind, form in cases():
        options = OPTIMIZERS[name] | FORMS[form] | {"late_from": HALF}
        place = folder / f"{name} {kind} {form}"
        first_build = partial(build, frozen=kind == "frozen")
        part = Run(worker, first_build, stop_after=HALF, output_dir=place, **options)
        rest = continued(worker, place, **options)
        found[name, kind, form] = {"part": part.found(), "rest": rest.found()}
        if kind == "trainable":
            found[name, kind, form]["whole"] = Run(worker, **options).found()
    return found


def others(worker, folder) -> dict:
    """The halves, continued on another number of ranks."""
    found = {}
    for name, kind, form in cases():
        if form != "async":
            options = OPTIMIZERS[name] | FORMS[form] | {"late_from": HALF}
            found[name, kind, form] = continued(
                worker, folder / f"{name} {kind} {form}", **options
            ).found()
    return found


FORMS = {"sharded": {}, "async": {"async_save": True}} if FSDP else {"file": {}}


def cases() -> list[tuple[str, str, str]]:
    kinds = ("trainable", "frozen")
    return [(name, kind, form) for name in OPTIMIZERS for kind in kinds for form in FORMS]


def continued(worker, folder: Path, build=build, **options) -> Run:
    """Another run that goes on from a copy of the checkpoint in `folder` after step HALF."""
    copy = folder.with_name(f"{folder.name} on {worker.world_size}")
    if worker.is_main:
        saved = max(folder.glob("checkpoints/step_*"))
        if saved.is_dir():
            shutil.copytree(saved, copy / "checkpoints" / saved.name)
        else:
            (copy / "checkpoints").mkdir(parents=True)
            shutil.copy(saved, copy / "checkpoints")
    torch.distributed.barrier()
    return Run(worker, build, output_dir=copy, **options)


def statistics(worker, folder) -> dict:
    """BatchNorm's, whenever the model is evaluated or saved."""
    seen = []

    def noted(function):
        def call(*args):
            norm = Run.current.model.norm
            seen.append((norm.running_mean.clone(), norm.running_var.clone()))
            return function(*args)

        return call

    save = "start_save" if FSDP else "save_checkpoint"
    before = {name: getattr(train, name) for name in ("evaluate", save)}
    for name, function in before.items():
        setattr(train, name, noted(function))
    run = Run(worker, partial(build, norm=True), output_dir=folder / "statistics")
    for name, function in before.items():
        setattr(train, name, function)
    return run.found() | {"seen": seen}


def layouts(worker, folder) -> dict:
    options = {"build": lambda settings: Odd(empty=not FSDP), "units": lambda model: [model.first]}
    part = Run(worker, stop_after=HALF, output_dir=folder / "odd", **options)
    return {"part": part.found(), "rest": continued(worker, folder / "odd", **options).found()}


class AllKinds(nn.Module):
    """What a user's module may hold; `seed` makes the values."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        parameters = {
            "slice": torch.randn(16, 16)[2:6, ::3],
            "transpose": torch.randn(3, 5).t(),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "empty": torch.empty(0, 3),
            "scalar": torch.randn(()),
            "bf16": torch.randn(5, 3, dtype=torch.bfloat16).t(),
            "complex": torch.randn(4, 4, dtype=torch.complex64)[:, 1:3],
        }
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))
        self.register_buffer("yes", torch.rand(7, 2).t() < 0.5)
        self.register_buffer("numbers", torch.randint(2**40, (3, 4)).t(), persistent=False)
        self.register_buffer("expanded", torch.randn(3, 1), persistent=False)


def any_tensor(worker, folder) -> dict:
    """DDP: saved by rank 0, and on all ranks what was saved."""
    expected, model = AllKinds(seed=1), AllKinds(seed=1)
    saved = {"model": expected, "optimizer": momentum_of(expected)}
    checkpoint.save_checkpoint(folder / "any", saved, 3, {}, worker)
    torch.manual_seed(2 + worker.rank)
    model = AllKinds(seed=2 + worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}
    checkpoint.resume(folder / "any", parts, {}, worker)
    pairs = list(zip(tensors(model).values(), tensors(expected).values(), strict=True))
    states = [o.state_dict()["state"] for o in (optimizer, saved["optimizer"])]
    pairs += [(states[0][i]["momentum_buffer"], s["momentum_buffer"]) for i, s in states[1].items()]
    names = list(tensors(model)) + [f"momentum {i}" for i in states[1]]
    return {name: torch.equal(*pair) for name, pair in zip(names, pairs, strict=True)}


def momentum_of(model) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def refused(worker, folder) -> dict:
    """What ends with one sentence."""
    other = worker.rank == worker.world_size - 1
    found = {
        "length": Run(worker, load=lambda: data(SAMPLES + 6 * other)),
        "numbers": Run(worker, load=lambda: data(shift=0.5 * other)),
        "no samples": Run(worker, load=lambda: data(0)),
    }
    if FSDP:
        values = {
            "constant": lambda: torch.ones(3),
            "constants": lambda: {"of each layer": [0, (torch.ones(3), torch.ones(4))]},
            "rates": lambda: [rate.item() for rate in torch.linspace(0, 0.1, 3)],
            "scalar": lambda: nn.Parameter(torch.ones(())),
            "empty": lambda: nn.Parameter(torch.ones(0, 3)),
        }
        for name, value in values.items():
            found[name] = Run(worker, lambda settings, value=value: with_attribute(value()))
        real = checkpoint.checksum

        def vanishes(file: Path) -> int:
            """As if this rank wrote on a disk of its own."""
            value = real(file)
            if other:
                file.unlink()
            return value

        checkpoint.checksum = vanishes
        found["vanished"] = Run(worker, output_dir=folder / "vanished")
        checkpoint.checksum = real
    else:
        found |= drifting(worker)
    return {name: run.error for name, run in found.items()}


def drifting(worker) -> dict:
    """Ranks of DDP that train on their own: the faults that a user makes in train.py or task.py."""
    source = inspect.getsource(STEP)
    assert source.count("compute_loss(ddp_model, part)") == 1
    edited = source.replace("compute_loss(ddp_model, part)", "compute_loss(ddp_model.module, part)")
    names = dict(vars(train), compute_loss=compute_loss)
    exec(edited, names)
    found = {"past the wrapper": Run(worker, step=names["train_step"], log_every=3)}
    wrap = train.DistributedDataParallel

    def wrap_and_unfreeze(model, **options):
        wrapped = wrap(model, **options)
        model.second.requires_grad_(True)
        return wrapped

    train.DistributedDataParallel = wrap_and_unfreeze
    found["unfrozen"] = Run(worker, partial(build, frozen=True), log_every=3, clip=0)

    def build_by_rank(settings):
        torch.manual_seed(worker.rank)
        return build()

    train.DistributedDataParallel = partial(wrap, init_sync=False)
    found["seed"] = Run(worker, build_by_rank, log_every=3)
    train.DistributedDataParallel = wrap

    def count_of_rank(run) -> None:
        run.model.table += worker.rank

    found["a rank's own count"] = Run(worker, spoil=count_of_rank, log_every=3)
    return found


def copies(worker, folder) -> dict:
    """HSDP: two copies of two shards each; then continued as four shards."""

    def spoil(run) -> None:
        if run.done == 3 and worker.rank == 3:
            with torch.no_grad():
                run.model.second.weight.to_local()[0, 0] += 1

    spoiled, late = Run(worker, spoil=spoil, dp_replicate=2).error, {"late_from": HALF}
    part = Run(worker, stop_after=HALF, output_dir=folder / "copies", dp_replicate=2, **late)
    rest = continued(worker, folder / "copies", **late)
    return {"spoiled": spoiled, "part": part.found(), "rest": rest.found()}


def memory(worker, folder) -> dict:
    """FSDP: bytes of all tensors before the second micro-batch, beyond those before the first."""
    found = {}
    for name, options in {"default": {}, "reduce once": {"reduce_once": True}}.items():
        held = []

        def noted_loss(model, batch, held=held):
            held.append(bytes_of_tensors())
            return compute_loss(model, batch)

        options |= {"compute_loss": noted_loss, "units": list, "batch_size": 24, "accumulate": 4}
        run = Run(worker, lambda settings: wide(), epochs=1, **options)
        size = sum(t.nbytes for t in run.last.values())
        # Of the second step: the first has made the optimizer's state.
        found[name] = [(now - held[4]) / size for now in held[5:8]]
    return found


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Linear(512, 3))


def bytes_of_tensors() -> int:
    """Of memory that a tensor in Python, or its gradient, has."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                local = getattr(tensor, "_local_tensor", tensor)
                if local is not None and not local.is_meta:
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def with_attribute(value) -> Own:
    model = build()
    model.second.constant = value
    return model


def main() -> None:
    folder = Path(sys.argv[3])
    with distributed_worker("cpu") as worker:
        for phase in sys.argv[2].split(","):
            found = [None] * worker.world_size
            torch.distributed.all_gather_object(found, globals()[phase](worker, folder))
            if worker.is_main:
                torch.save(found, folder / f"{phase}_{worker.world_size}.pt")
        # What holds a run holds its model, and that the group.
        train.make_optimizer = train.train_step = train.build_model = Run.current = None
        train.compute_loss = evaluation.compute_loss = train.units = train.load_data = None


if __name__ == "__main__":
    main()
