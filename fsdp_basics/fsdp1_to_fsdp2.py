"""From FullyShardedDataParallel (FSDP1) to fully_shard (FSDP2): option by option, both run.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/fsdp1_to_fsdp2.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/fsdp1_to_fsdp2.py  # HYBRID_SHARD: 2 x 2

FSDP1 wraps modules, and lays the parameters of each into one flat parameter. fully_shard changes
modules in place: a parameter stays one, with its name, and a rank holds rows of it, as a DTensor.
What FSDP1 has options and contexts for is then plain PyTorch: a loop instead of a wrap policy,
state_dict() instead of state-dict types, torch's own clip_grad_norm_.

The pairs are in fsdp1_options.py. Look at the differences: each line trains one model both ways,
from the same start with the same data. At the end, a run of FSDP1 goes on under FSDP2.
"""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from data import load_dataset
from fsdp1_options import cases
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if worker.world_size == 1:
            raise UserError(
                "one rank has nothing to shard: start two or more with torchrun --standalone "
                "--nproc_per_node=2"
            )
        if args.batch_size % (2 * worker.world_size):
            raise UserError(
                f"--batch-size {args.batch_size} does not divide by twice the {worker.world_size} "
                "ranks (two backward passes per step show no_sync)"
            )
        # FSDP1 warns of its own end in many places: that is the subject here.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    data = load_dataset("digits")[0][:]
    if worker.is_main:
        print(f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}\n")
        print(f"{'':71}largest difference of")
        print(f"{'FullyShardedDataParallel':31}{'fully_shard':36}       loss   gradient  parameter")
    for case in cases(worker):
        if case.old is None:
            print_row(case.option, case.successor, None, None, None, worker)
            continue
        results = []
        for build in (case.old, case.new):
            run = Run(build(), args, worker, data, case.parts, case.clip)
            for i in range(args.steps - 1):
                run.step(i, look=False)
            results.append(run.step(args.steps - 1))
        row = torch.tensor(differences(*results), dtype=torch.float64, device=worker.device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)  # the rank that is furthest off counts
        print_row(case.option, case.successor, *row.tolist(), worker)
    if worker.is_main:
        print()
    for row in state_dicts(args, worker, data):
        print_row(*row, worker)
    if worker.is_main:
        if worker.device.type == "cpu":
            print("\n* FSDP1 has this on GPUs only: compared with its FULL_SHARD")
        print("NO_SHARD is not run: FSDP1 never frees such a model, and with it the process group")


class Run:
    """A model, whoever sharded it, and its training step."""

    def __init__(self, model, args, worker: Worker, data, parts: int = 1, clip: bool = False):
        self.model, self.worker, self.data, self.size = model, worker, data, args.batch_size
        self.parts, self.clip = parts, clip
        self.optimizer = OPTIMIZERS[args.optimizer](model.parameters())

    def step(self, index: int, look: bool = True) -> dict[str, Tensor]:
        """Take a step; look: return its loss, its gradients and the parameters it left, whole."""
        model, new = self.model, isinstance(self.model, FSDPModule)
        share = torch.arange(self.worker.rank, self.size, self.worker.world_size)
        parts = (share + index * self.size).chunk(self.parts)
        self.optimizer.zero_grad()
        loss = sum(self.backward(part, last=part is parts[-1]) for part in parts)
        if self.clip and not new:
            model.clip_grad_norm_(CLIP)
        elif self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found = whole(self.model, "gradient") if look else {}
        self.optimizer.step()
        found |= whole(self.model, "parameter") if look else {}
        dist.all_reduce(loss.div_(self.worker.world_size))
        return found | {"loss": loss}

    def backward(self, part: Tensor, last: bool) -> Tensor:
        new = isinstance(self.model, FSDPModule)
        if new:
            self.model.set_requires_gradient_sync(last)  # stays so until it is set again
        with nullcontext() if new or last else self.model.no_sync():
            images, labels = (t[part].to(self.worker.device) for t in self.data)
            loss = F.cross_entropy(self.model(images).float(), labels) / self.parts
            loss.backward()
        return loss.detach()


def whole(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Copies of all parameters, or of all gradients, under "parameter NAME" or "gradient NAME"."""
    if isinstance(model, FullyShardedDataParallel):
        # In this context, and only there, the wrapped modules hold whole parameters.
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return copies(model, kind)
    return copies(model, kind)  # a DTensor knows how to become whole


def copies(model: nn.Module, kind: str) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        tensor = param if kind == "parameter" else param.grad
        # FSDP1 shows zeros as the gradient of a frozen parameter.
        if tensor is not None and (kind == "parameter" or param.requires_grad):
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            found[f"{kind} {name}"] = plain(tensor)
    return found


def differences(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[float]:
    """Largest difference of the loss, of any gradient, of any parameter."""
    if old.keys() != new.keys():
        raise RuntimeError(f"not the same tensors: {old.keys() ^ new.keys()}")
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for name, tensor in old.items():
        kind = name.split()[0]
        worst[kind] = max(worst[kind], (tensor - new[name]).abs().max().item())
    return list(worst.values())


def state_dicts(args, worker: Worker, data) -> list[tuple]:
    """Compare what both save after a step; then continue the run of FSDP1 under FSDP2."""
    case = cases(worker)[0]
    old, new = runs = [Run(build(), args, worker, data) for build in (case.old, case.new)]
    for run in runs:
        run.step(0, look=False)
    context, full = FullyShardedDataParallel.state_dict_type, StateDictOptions(full_state_dict=True)
    with context(old.model, StateDictType.FULL_STATE_DICT):
        state = old.model.state_dict()
    with context(old.model, StateDictType.SHARDED_STATE_DICT):
        shards = old.model.state_dict()
        # Not with FULL_STATE_DICT: on CPUs, torch 2.13 then returns the last of the optimizer's
        # states, exp_avg_sq, under all of their names.
        optimizer_state = FullyShardedDataParallel.optim_state_dict(old.model, old.optimizer)
    for entry in optimizer_state["state"].values():
        entry.update({key: plain(tensor) for key, tensor in entry.items()})
    new_state = get_optimizer_state_dict(new.model, new.optimizer, options=full)
    pairs = {
        ("FULL_STATE_DICT", "get_model_state_dict(full)"): (
            state,
            get_model_state_dict(new.model, options=full),
        ),
        ("SHARDED_STATE_DICT", "model.state_dict()"): (shards, new.model.state_dict()),
        ("FSDP.optim_state_dict", "get_optimizer_state_dict"): (
            flatten(optimizer_state["state"]),
            flatten(new_state["state"]),
        ),
    }
    table = []
    for names, states in pairs.items():
        left, right = ({f"parameter {n}": plain(t) for n, t in x.items()} for x in states)
        table.append((*names, None, None, differences(left, right)[-1]))

    continued = Run(case.new(), args, worker, data)
    load_from_fsdp1(continued.model, continued.optimizer, state, optimizer_state, worker)
    results = [run.step(1) for run in (old, continued)]
    table.append(("one step more", "the same, from FSDP1's states", *differences(*results)))
    return table


def load_from_fsdp1(model, optimizer, state: dict, optimizer_state: dict, worker: Worker) -> None:
    """Load full state dicts of FSDP1 into a sharded model and its optimizer; all ranks call it.

    Only rank 0 needs the states: the others receive their shards from it. With models that do not
    fit there, save with torch.distributed.checkpoint from FSDP1's sharded states instead: it
    loads them into any sharding. (A FULL_STATE_DICT has the names of the bare model; what FSDP1
    gave names of its own, the flat parameters of LOCAL_STATE_DICT, only FSDP1 can read.)
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mine = worker.is_main
    set_model_state_dict(model, state if mine else {}, options=options)
    set_optimizer_state_dict(model, optimizer, optimizer_state if mine else {}, options=options)


def flatten(state: dict[str, dict]) -> dict[str, Tensor]:
    return {f"{name} {key}": t for name, entry in state.items() for key, t in entry.items()}


def plain(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().cpu().clone()


def print_row(option: str, successor: str, loss, gradient, parameter, worker: Worker) -> None:
    numbers = ("" if x is None else f"{x:.1e}" for x in (loss, gradient, parameter))
    if worker.is_main:
        print(f"{option:31}{successor:36}{''.join(f'{number:>11}' for number in numbers)}".rstrip())


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    # foreach: a few calls for all parameters together, which matters where each is a DTensor
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3, foreach=True),
}
CLIP = 0.1  # far below the norm of the gradients, so that it does something


def parse_args():
    parser = ArgumentParser(description="FSDP1's options and their successors, both run.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=48, help="images, over all ranks")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, not {getattr(args, name)}")
    return args


if __name__ == "__main__":
    main()
