"""From FullyShardedDataParallel (FSDP1) to fully_shard (FSDP2): option by option, both run.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/fsdp1_to_fsdp2.py
    torchrun --standalone --nproc_per_node=4 fsdp_basics/fsdp1_to_fsdp2.py  # HYBRID_SHARD: 2 x 2

FSDP1 wraps modules, and flattens the parameters of each into one flat parameter. fully_shard
changes modules in place: each parameter keeps its name and becomes a DTensor, of which a rank holds
some rows. Plain PyTorch replaces the options and contexts of FSDP1: a loop instead of a wrap
policy, state_dict() instead of state-dict types, torch's own clip_grad_norm_.

The pairs are in fsdp1_options.py. Look at the differences: each line trains one model both ways,
from the same start with the same data. At the end, a run of FSDP1 continues under FSDP2.
"""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from data import load_dataset
from differences import full_tensor, largest_differences
from fsdp1_models import Job, fsdp1, fsdp2, make_job
from fsdp1_options import OPTIONS
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
        # FSDP1 warns in many places that it is deprecated, which is the subject here.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        compare(args, worker)


def compare(args, worker: Worker) -> None:
    data = load_dataset("digits")[0][:]
    job = make_job(worker)
    if worker.is_main:
        rows, columns = job.hybrid_mesh.shape
        print(f"{args.steps} steps with {args.optimizer}, global batch {args.batch_size}")
        print(f"the hybrid mesh has {rows} x {columns} ranks\n")
        print(f"{'':71}largest difference of")
        print(f"{'FullyShardedDataParallel':31}{'fully_shard':36}       loss   gradient  parameter")
    for option in OPTIONS:
        name = f"{option.name} *" if option.gpu_only and not job.on_gpu else option.name
        old, new = option.build(job)
        if old is None:
            print_row(name, option.successor, None, None, None, worker)
            continue
        # FSDP1 gathers gradients from where they are, and NCCL refuses those that are on the CPU.
        gradients = not (option.offloads and job.on_gpu)
        results = []
        for model in (old, new):
            run = Run(model, args, worker, data, option.accumulate, option.clip)
            for i in range(args.steps - 1):
                run.step(i)
            results.append(run.step(args.steps - 1, look=True, gradients=gradients))
        row = torch.tensor(largest_differences(*results), dtype=torch.float64)
        row = row.to(worker.device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)  # the largest difference on any rank
        loss, gradient, parameter = row.tolist()
        print_row(name, option.successor, loss, gradient if gradients else None, parameter, worker)
    if worker.is_main:
        print()
    for row in compare_state_dicts(job, args, data):
        print_row(*row, worker)
    if worker.is_main:
        if not job.on_gpu:
            print("\n* FSDP1 has this on GPUs only: compared with its FULL_SHARD")
        print("NO_SHARD is not run: FSDP1 never frees such a model, and with it the process group")


class Run:
    """The training of a model that FSDP1 or FSDP2 has sharded."""

    def __init__(self, model, args, worker: Worker, data, accumulate: int = 1, clip: bool = False):
        self.model, self.worker, self.data = model, worker, data
        self.batch_size = args.batch_size
        self.accumulate = accumulate
        self.clip = clip
        self.is_fsdp2 = isinstance(model, FSDPModule)
        self.optimizer = OPTIMIZERS[args.optimizer](model.parameters())

    def step(self, index: int, look: bool = False, gradients: bool = True) -> dict[str, Tensor]:
        """Take a step on batch `index`.

        look: return its loss, and its full gradients and updated parameters.
        gradients: False leaves out the gradients.
        """
        worker, tensors = self.worker, {}
        local_batch = torch.arange(worker.rank, self.batch_size, worker.world_size)
        micro_batches = (local_batch + index * self.batch_size).chunk(self.accumulate)
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=worker.device)
        for micro_batch in micro_batches:
            loss += self.backward(micro_batch, is_last=micro_batch is micro_batches[-1])
        if self.clip and self.is_fsdp2:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        elif self.clip:
            self.model.clip_grad_norm_(CLIP)
        if look:
            loss /= worker.world_size
            dist.all_reduce(loss)
            tensors["loss"] = loss
        if look and gradients:
            tensors |= full_tensors(self.model, "gradient")
        self.optimizer.step()
        if look:
            tensors |= full_tensors(self.model, "parameter")
        return tensors

    def backward(self, indices: Tensor, is_last: bool) -> Tensor:
        images, labels = (t[indices].to(self.worker.device) for t in self.data)
        no_sync = nullcontext()
        if self.is_fsdp2:
            self.model.set_requires_gradient_sync(is_last)  # stays so until it is set again
        elif not is_last:
            no_sync = self.model.no_sync()
        with no_sync:
            loss = F.cross_entropy(self.model(images).float(), labels) / self.accumulate
            loss.backward()
        return loss.detach()


def full_tensors(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Copies of all parameters, or of all gradients, under "parameter NAME" or "gradient NAME"."""
    if isinstance(model, FullyShardedDataParallel):
        # Only in this context do the wrapped modules hold full parameters.
        with_grads = kind == "gradient"
        with FullyShardedDataParallel.summon_full_params(model, with_grads=with_grads):
            return copies(model, kind)
    return copies(model, kind)  # which gathers DTensors


def copies(model: nn.Module, kind: str) -> dict[str, Tensor]:
    tensors = {}
    for name, param in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
        if kind == "parameter":
            tensors[f"parameter {name}"] = plain(param)
        elif param.grad is not None and param.requires_grad:
            # (FSDP1 shows zeros as the gradient of a frozen parameter.)
            tensors[f"gradient {name}"] = plain(param.grad)
    return tensors


def compare_state_dicts(job: Job, args, data) -> list[tuple]:
    """Compare the state dicts of both after a step; then continue the run of FSDP1 under FSDP2.

    Returns rows of the table: (FSDP1's name, its successor, three differences); a difference is
    None where nothing is compared.
    """
    old = Run(fsdp1(job, job.model()), args, job.worker, data)
    new = Run(fsdp2(job, job.model()), args, job.worker, data)
    old.step(0)
    new.step(0)

    state_dict_type = FullyShardedDataParallel.state_dict_type
    with state_dict_type(old.model, StateDictType.FULL_STATE_DICT):
        old_state = old.model.state_dict()
    with state_dict_type(old.model, StateDictType.SHARDED_STATE_DICT):
        old_shards = old.model.state_dict()
        # Not with FULL_STATE_DICT: on CPUs, torch 2.13 then returns the last of the optimizer's
        # states, exp_avg_sq, under all of their names.
        old_optimizer_state = FullyShardedDataParallel.optim_state_dict(old.model, old.optimizer)
    for entry in old_optimizer_state["state"].values():
        for key, tensor in entry.items():
            entry[key] = plain(tensor)

    full = StateDictOptions(full_state_dict=True)
    new_state = get_model_state_dict(new.model, options=full)
    new_shards = new.model.state_dict()
    new_optimizer_state = get_optimizer_state_dict(new.model, new.optimizer, options=full)

    table = []
    for name, successor, left, right in (
        ("FULL_STATE_DICT", "get_model_state_dict(full)", old_state, new_state),
        ("SHARDED_STATE_DICT", "model.state_dict()", old_shards, new_shards),
        (
            "FSDP.optim_state_dict",
            "get_optimizer_state_dict",
            flatten(old_optimizer_state["state"]),
            flatten(new_optimizer_state["state"]),
        ),
    ):
        _, _, difference = largest_differences(as_parameters(left), as_parameters(right))
        table.append((name, successor, None, None, difference))

    continued = Run(fsdp2(job, job.model()), args, job.worker, data)
    load_from_fsdp1(
        continued.model, continued.optimizer, old_state, old_optimizer_state, job.worker
    )
    difference = largest_differences(old.step(1, look=True), continued.step(1, look=True))
    table.append(("one step more", "the same, from FSDP1's states", *difference))
    return table


def load_from_fsdp1(model, optimizer, state: dict, optimizer_state: dict, worker: Worker) -> None:
    """Load full state dicts of FSDP1 into a sharded model and its optimizer; all ranks call it.

    Only rank 0 needs the states: it sends every rank its shards. If a model does not fit there,
    save FSDP1's sharded states with torch.distributed.checkpoint instead, which loads them into
    any sharding. (A FULL_STATE_DICT has the names of the bare model. A LOCAL_STATE_DICT has flat
    parameters under names of FSDP1's own, and only FSDP1 can read it.)
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if not worker.is_main:
        state, optimizer_state = {}, {}
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)


def flatten(state: dict[str, dict]) -> dict[str, Tensor]:
    return {f"{name} {key}": t for name, entry in state.items() for key, t in entry.items()}


def as_parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"parameter {name}": plain(tensor) for name, tensor in state.items()}


def plain(tensor: Tensor) -> Tensor:
    """A copy of the full tensor in fp32, on the CPU."""
    return full_tensor(tensor).float().cpu()


def print_row(option: str, successor: str, loss, gradient, parameter, worker: Worker) -> None:
    numbers = ("" if x is None else f"{x:.1e}" for x in (loss, gradient, parameter))
    if worker.is_main:
        print(f"{option:31}{successor:36}{''.join(f'{number:>11}' for number in numbers)}".rstrip())


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    # foreach: a few calls update all parameters, which saves DTensor's overhead per call
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3, foreach=True),
}
CLIP = 0.1  # far below the norm of the gradients, so that clipping has an effect


def parse_args():
    parser = ArgumentParser(description="FSDP1's options and their successors, both run.")
    parser.add_argument("--steps", type=at_least(1), default=2, help="optimizer steps")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=48, help="images per step, over all ranks"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of all runs"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
