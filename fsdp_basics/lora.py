"""Low-rank adaptation (LoRA) under fully_shard: a frozen base, small adapters, both sharded.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/lora.py
    torchrun --standalone --nproc_per_node=2 fsdp_basics/lora.py --rank 16 --output-dir runs/lora
    python fsdp_basics/lora.py

A linear layer keeps its weight W frozen, and adds the product of two thin matrices that it trains:
y = (W + alpha / rank * B A) x. The script trains the base for a moment on upright digits; the
adapters then learn digits that lie on their side.

W, A and B of a block are in one FSDP unit: fully_shard accepts frozen and trainable parameters in
one unit. Frozen shards are gathered too, because the block computes with them. Only trainable
parameters get gradients, and only their gradients are reduced. (FSDP1 flattens a unit into one flat
parameter: it refuses the mixture, or with use_orig_params=True reduces gradients for all of it. The
last lines of the output show both.)

For a Llama, or another model of the Hugging Face hub, peft adds adapters to named layers:
get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])). Then apply fully_shard to
its blocks as here (tried once, with peft 0.21 and a small Llama on two ranks). Its names differ:
base_layer.weight, lora_A.default.weight, lora_B.default.weight.

Look at the table: full fine-tuning next to LoRA, per rank and step, counted. Adapters are saved
alone, in one small file. Merged weights W + alpha / rank * B A cost nothing and need no LoRA code.
"""

import math
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least
from collective_calls import CollectiveCalls
from data import load_dataset
from differences import full_tensor, local_tensor
from model import VisionTransformer
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

LAYERS = ("query_key_value", "attention_out", "expand", "contract")  # of each block


class LoRALinear(nn.Linear):
    """The layer `linear` with adapters; its weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # B is 0: at first nothing changes
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + alpha / rank * B A, sharded like W: each rank uses its rows of B, and gathers A."""
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


def add_adapters(model: VisionTransformer, rank: int, alpha: float) -> None:
    """Freeze `model`, and give each of LAYERS trainable adapters. Call `shard` after it."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in LAYERS:
            setattr(block, name, LoRALinear(getattr(block, name), rank, alpha))


def shard(model: VisionTransformer, mesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # frozen and trainable parameters in one unit
    fully_shard(model, mesh=mesh)  # the root's own parameters are all frozen


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The full adapters, on the CPU of rank 0; all ranks call this. The base is not gathered."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=options)
    return {name: tensor.clone() for name, tensor in adapters.items()}  # copies


def load_adapters(model: nn.Module, adapters: dict[str, Tensor]) -> None:
    """Only rank 0 needs `adapters`, and sends them to any number of ranks; all ranks call this.

    Raises ValueError, on all ranks, for a name that the model or `adapters` does not have.
    """
    parameters = dict(model.named_parameters())
    missing = {name for name, p in parameters.items() if p.requires_grad} - adapters.keys()
    problem = [f"the adapters have no {min(missing)}"] if missing else [None]
    if unknown := adapters.keys() - parameters.keys():
        problem = [f"the model has no parameter {min(unknown)}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ValueError(problem[0])
    model.reshard()  # an evaluation has left the root gathered
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, adapters, options=options)


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The full state dict of the model with its adapters merged; all ranks call this."""
    modules, state = dict(model.named_modules()), {}
    for name, tensor in model.state_dict().items():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, LoRALinear) and name.endswith(".weight"):
            tensor = module.merged_weight()
        if not name.endswith((".lora_a", ".lora_b")):
            state[name] = full_tensor(tensor)
    return state


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        compare(args, worker)
        if worker.world_size > 1:
            try_fsdp1(args, worker)


def compare(args, worker: Worker) -> None:
    train_set, test_set = (dataset[:] for dataset in load_dataset("digits"))
    base = pretrained(train_set, args)
    lying, lying_test = on_their_side(train_set), on_their_side(test_set)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))

    seen, accuracies = {}, {}
    for way in ("full", "LoRA"):
        model = build(args)
        model.load_state_dict(base)  # before the adapters, which `base` does not have
        if way == "LoRA":
            add_adapters(model, args.rank, args.alpha)
        shard(model.to(worker.device), mesh)
        accuracies["base"] = accuracy(model, lying_test, worker)
        seen[way] = train(model, lying, args, worker)
        accuracies[way] = accuracy(model, lying_test, worker)

    with CollectiveCalls() as calls:
        adapters = adapters_of(model)
    state = merged(model)
    plain = build(args).to(worker.device)
    plain.load_state_dict(state)  # neither LoRA nor FSDP
    images = lying_test[0].to(worker.device)
    with torch.no_grad():
        difference = (plain(images) - model(images)).abs().max().item()
    if not worker.is_main:
        return
    print_table(seen)
    print("\ntest accuracy on digits that lie on their side")
    for way, value in accuracies.items():
        print(f"{way:34}{value:12.2%}")
    size = sum(tensor.nbytes for tensor in adapters.values())
    print(f"\nadapters alone: {size:,} bytes, gathered by {calls.count['all_gather']} all_gathers")
    print(f"merged: logits of the plain model differ by {difference:.1e} at most")
    if args.output_dir:
        adapters = {"rank": args.rank, "alpha": args.alpha, "adapters": adapters}
        torch.save(adapters, args.output_dir / "adapters.pt")
        torch.save(state, args.output_dir / "merged.pt")


def build(args) -> VisionTransformer:
    torch.manual_seed(args.seed)
    return VisionTransformer(dim=args.dim, depth=args.depth)


def pretrained(data: tuple[Tensor, Tensor], args) -> dict[str, Tensor]:
    """Train a base on upright digits, in place of a download. (Each rank trains the same base.)"""
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(args.base_steps):
        batch = torch.randint(len(data[0]), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
        optimizer.step()
    return model.state_dict()


def on_their_side(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0].rot90(dims=(2, 3)), data[1]


def train(model: nn.Module, data: tuple[Tensor, Tensor], args, worker: Worker) -> dict[str, int]:
    """Train; return bytes held on this rank, and bytes of the collectives of the last step."""
    # Only trainable parameters belong in the optimizer. (A frozen parameter would have no state
    # there without a gradient, but checkpoints would have to know it.)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        batch = torch.randint(len(data[0]), (args.batch_size,), generator=generator)
        images, labels = (t[batch[worker.rank :: worker.world_size]] for t in data)
        optimizer.zero_grad()
        with CollectiveCalls() as calls:
            logits = model(images.to(worker.device))
            F.cross_entropy(logits, labels.to(worker.device)).backward()
        optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "shards of parameters": held(model.parameters()),
        "... trainable": held(trainable),
        "... their gradients": held(p.grad for p in model.parameters() if p.grad is not None),
        "... the optimizer's state": held(states),
        "gathered in a step": calls.bytes["all_gather"],
        "gradients reduced in a step": calls.bytes["reduce_scatter"],
    }


def held(tensors) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def print_table(seen: dict[str, dict[str, int]]) -> None:
    print(f"\n{'bytes on rank 0':34}{'full':>12}{'LoRA':>12}   LoRA / full")
    for name, full in seen["full"].items():
        lora = seen["LoRA"][name]
        ratio = f"{lora / full:14.3f}" if full else ""  # one process sends nothing
        print(f"{name:34}{full:12,}{lora:12,}{ratio}")


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], worker: Worker) -> float:
    """Every rank tests all images (they are few): a sharded forward pass is a collective."""
    predicted = model(data[0].to(worker.device)).argmax(dim=1)
    # After a forward pass without a backward the root stays gathered: parameters() would return its
    # full parameters, and an optimizer made from them would update copies that FSDP drops.
    model.reshard()
    return (predicted == data[1].to(worker.device)).float().mean().item()


def try_fsdp1(args, worker: Worker) -> None:
    """Put one block with adapters into FSDP1's flat parameter, and print what happens."""
    warnings.simplefilter("ignore")  # FSDP1 warns that it is deprecated
    for use_orig_params in (False, True):
        model = build(args)
        add_adapters(model, args.rank, args.alpha)
        options = {"device_id": worker.device, "use_orig_params": use_orig_params}
        try:
            block = FullyShardedDataParallel(model.blocks[0].to(worker.device), **options)
            with CollectiveCalls() as calls:
                block(torch.randn(2, 16, args.dim, device=worker.device)).sum().backward()
            says = f"{calls.bytes['reduce_scatter']:,} bytes of gradients are reduced"
        except ValueError as error:
            says = f"{type(error).__name__}: {error}"
        if worker.is_main:
            print(f"FSDP1, one block, {use_orig_params=}: {says}")


def parse_args():
    parser = ArgumentParser(description="Low-rank adapters on a frozen base, both sharded.")
    add = parser.add_argument
    add("--rank", type=at_least(1), default=4, help="rank of B A: rows of A, columns of B")
    add("--alpha", type=above(0), default=8, help="scale the product B A by alpha / rank")
    add("--base-steps", type=at_least(0), default=100, help="steps that train the base")
    add("--steps", type=at_least(1), default=60, help="steps of each fine-tuning")
    add("--batch-size", type=at_least(1), default=48, help="images per step, over all ranks")
    add("--lr", type=above(0), default=3e-3, help="learning rate of AdamW")
    add("--dim", type=at_least(4), default=64, help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), default=2, help="transformer blocks")
    add("--output-dir", type=Path, help="save adapters.pt and merged.pt here")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if args.dim % 4:
        parser.error(f"--dim must be a multiple of 4, not {args.dim}")
    parser.make_folder("--output-dir", args.output_dir)
    return args


if __name__ == "__main__":
    main()
