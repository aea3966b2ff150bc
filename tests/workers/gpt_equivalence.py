"""Run transformer_basics/train.py's own step on every mesh of the matrix and save what came out.

Started by test_transformer_basics.py with 2, 4 and 8 ranks, which compares that with what
`one_process` returns: a bare model, in a loop that knows nothing of meshes. The global batches are
the same in all.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import torch
import train
from comparing_meshes import of_all_stages
from config import Settings, parse_args
from counting_by_axis import CountByAxis
from data import batch_part
from evaluation import mean_over_ranks
from model import GPT, cross_entropy, initialize
from optimizer import make_optimizer
from runtime import distributed_worker
from step import train_step
from torch.distributed.tensor import DTensor

STEPS, BATCH, LENGTH, VOCABULARY, LR = 3, 16, 12, 44, 0.01
SIZES = f"--layers 2 --heads 4 --dim 24 --block-size {LENGTH} --batch-size {BATCH} --lr {LR}"
# What changes the result, and so has a reference of its own.
KINDS = {
    "sgd": ("--clip 0", "sgd"),
    "adamw": ("--clip 0", "adamw"),
    "clip": ("--clip 0.1", "sgd"),
    "tied": ("--clip 0.1 --tied", "adamw"),
    "deep": ("--clip 0.1 --layers 5", "sgd"),
    "bf16": ("--clip 0 --precision bf16", "sgd"),
}
TP, SP, LP = "--tp {}", "--tp {} --sequence-parallel", "--tp {} --loss-parallel"
ALL = SP + " --loss-parallel"
MESHES = {  # ranks -> flags -> kinds
    2: {
        "": ("sgd", "adamw", "tied", "bf16"),
        "--activation-checkpointing --accumulate 4": ("sgd",),
        "--dp-shard 2": ("adamw", "clip", "tied", "bf16"),
        "--dp-shard 2 --keep-gathered --accumulate 2": ("clip",),
        "--dp-shard 2 --compile": ("clip",),
        TP.format(2): ("sgd", "adamw", "clip", "tied", "bf16"),
        SP.format(2): ("sgd",),
        TP.format(2) + " --compile": ("sgd",),
        LP.format(2): ("clip",),
        ALL.format(2): ("adamw", "tied", "bf16"),
        ALL.format(2) + " --activation-checkpointing --accumulate 2": ("clip",),
        "--pp 2": ("sgd", "adamw", "clip", "bf16"),
        "--pp 2 --accumulate 8": ("deep",),
        "--pp 2 --accumulate 4 --activation-checkpointing": ("clip",),
    },
    4: {
        TP.format(4): ("clip",),
        ALL.format(4): ("tied",),
        "--dp-replicate 2 --dp-shard 2": ("adamw", "clip"),
        "--dp-shard 2 " + TP.format(2): ("adamw", "clip"),
        "--dp-shard 2 " + ALL.format(2): ("sgd", "tied"),
        "--dp-replicate 2 " + TP.format(2): ("clip",),
        "--dp-replicate 2 " + ALL.format(2): ("adamw",),
        "--pp 4": ("deep",),
        "--pp 2 --dp-shard 2": ("adamw",),
        "--pp 2 --accumulate 4 " + ALL.format(2): ("clip",),
    },
    8: {  # three_dimensions.py has it without sequence parallelism and clipping
        "--pp 2 --dp-shard 2 " + ALL.format(2): ("clip",),
    },
}
CASES = [(n, m, k) for n, meshes in MESHES.items() for m, kinds in meshes.items() for k in kinds]


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def settings_of(flags: str) -> Settings:
    sys.argv = ["train.py", *SIZES.split(), *flags.split()]
    return parse_args()


def optimizer_of(name: str, model, settings):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make_optimizer(model, settings)


def one_process(kind: str) -> dict:
    flags, name = KINDS[kind]
    settings = settings_of(flags.replace("bf16", "fp32"))
    model = initialize(GPT(settings.model(VOCABULARY)), seed=0)
    for p in model.parameters():
        p.device_mesh = None  # read by make_optimizer
    optimizer = optimizer_of(name, model, settings)
    found = {"loss": [], "norm": [], "gradients": []}
    for x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or torch.inf)
        found["norm"].append(norm.item())
        found["loss"].append(loss.item())
        found["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    found["gradients"] = found["gradients"][:: STEPS - 1]
    return found | {"parameters": [{name: p.detach() for name, p in model.named_parameters()}]}


def on_mesh(flags: str, kind: str, worker) -> dict:
    more, name = KINDS[kind]
    settings = settings_of(f"{flags} {more}")
    found = {"loss": [], "norm": [], "gradients": []}

    def note_memory(model, *args):
        found["had_memory"] = any(not p.is_meta for p in model.parameters())
        return initialize(model, *args)

    train.initialize = note_memory
    mesh, model, pipeline = train.spread_model(settings.model(VOCABULARY), settings, worker)
    optimizer, (part, parts) = optimizer_of(name, model, settings), batch_part(mesh)
    # That the flags did something: what rank 0 holds, how often it computes its first MLP, how many
    # tokens it has between the layers, whether it has the logits of some of the vocabulary only.
    first_block, found["mlp_calls"] = next(iter(model.blocks.values())), 0
    found["held"] = sum(p.to_local().numel() for p in model.parameters())
    found["compiled"] = first_block._compiled_call_impl is not None
    found["axes"], found["ranks"] = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()

    def count(*_) -> None:
        found["mlp_calls"] += 1

    def note_tokens(block, inputs) -> None:
        found["tokens"] = inputs[0].shape[1]

    def note_output(model, inputs, output) -> None:
        found["logits_are_cut"] = isinstance(output, DTensor)

    if not found["compiled"]:
        first_block.mlp.register_forward_pre_hook(count)
        first_block.register_forward_pre_hook(note_tokens)
    model.register_forward_hook(note_output)
    for step, (x, y) in enumerate(batches()):
        x, y = x[part::parts], y[part::parts]
        loss, norm = train_step(model, pipeline, x, y, optimizer, mesh, settings)
        found["loss"].append(mean_over_ranks(loss, mesh))
        found["norm"].append(norm.item())
        if step in (0, STEPS - 1):
            found["gradients"].append(of_all_stages("", model, lambda p: p.grad, settings.pp))
    return found | {"parameters": [of_all_stages("", model, torch.Tensor.detach, settings.pp)]}


def gathered(worker) -> dict:
    """What FSDP holds gathered, or has on its way, while each of 4 blocks computes in forward."""
    settings = settings_of("--dp-shard 2 --layers 4")
    mesh, model, _ = train.spread_model(settings.model(VOCABULARY), settings, worker)
    blocks, found = list(model.blocks.values()), []
    bytes_of = [sum(p.numel() * 4 for p in block.parameters()) for block in blocks]
    whole = sum(p.numel() * 4 for p in model.parameters())

    def look(block) -> None:
        earlier = range(blocks.index(block))
        freed = [i for i in earlier if isinstance(next(blocks[i].parameters()), DTensor)]
        begun = sent.nbytes["dp_shard", "all_gather"]
        found.append(begun - sum(bytes_of[i] for i in freed))

    for block in blocks:  # of a part of it: a block's own hook would run before FSDP's
        block.mlp.register_forward_pre_hook(lambda *_, block=block: look(block))
    with CountByAxis(mesh) as sent:
        model(next(batches())[0])
    return {"found": found, "blocks": bytes_of, "root": whole - sum(bytes_of)}


def keeps_gathered(flags: str, worker) -> bool:
    """Whether the first block's parameters are still there, not sharded, after its forward."""
    settings = settings_of(f"--dp-shard 2 {flags}")
    _, model, _ = train.spread_model(settings.model(VOCABULARY), settings, worker)
    model(next(batches())[0])
    return not isinstance(next(model.blocks["0"].parameters()), DTensor)


def traffic(flags: str, worker) -> CountByAxis:
    """What the second step with FSDP over 2 ranks sends."""
    settings = settings_of(f"--dp-shard 2 {flags}")
    mesh, model, pipeline = train.spread_model(settings.model(VOCABULARY), settings, worker)
    optimizer, (part, parts) = make_optimizer(model, settings), batch_part(mesh)
    x, y = next(batches())
    for _ in range(2):
        with CountByAxis(mesh) as sent:
            train_step(model, pipeline, x[part::parts], y[part::parts], optimizer, mesh, settings)
    return sent


def reductions(flags: str, worker) -> tuple[int, int]:
    """How many reduce_scatters a step takes, and their bytes."""
    sent = traffic(flags, worker)
    return sent.calls["dp_shard", "reduce_scatter"], sent.nbytes["dp_shard", "reduce_scatter"]


def main() -> None:
    with distributed_worker("cpu") as worker:
        meshes = MESHES[worker.world_size].items()
        results = {(m, k): on_mesh(m, k, worker) for m, kinds in meshes for k in kinds}
        if worker.world_size == 2:
            results["gathered"] = gathered(worker)
            flags = ("", "--accumulate 4", "--precision bf16")
            results["reductions"] = {each: reductions(each, worker) for each in flags}
            results["kept"] = [keeps_gathered(flags, worker) for flags in ("", "--keep-gathered")]
        if worker.world_size == 4:
            sent = traffic("--pp 2 --accumulate 4", worker)
            results["gatherings"] = sent.calls["dp_shard", "all_gather"]
        if worker.is_main:
            torch.save(results, OUTPUT)


if __name__ == "__main__":
    OUTPUT = Path(sys.argv[1])
    main()
