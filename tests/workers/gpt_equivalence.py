"""Run transformer_basics/train.py's own step on every mesh of the matrix and save what came out.

Started by test_transformer_basics.py with 2, 4 and 8 ranks, which compares that with what
`one_process` returns: a bare model, in a loop that knows nothing of meshes. Of the code under test
it calls the model alone: first values, loss, clipping and optimizer are written out here. The
global batches are the same in all.
"""

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import parallelize
import step as one_step
import torch
import torch.nn.functional as F
from comparing_meshes import of_all_stages
from config import Settings
from counting_by_axis import CountByAxis
from data import batch_part
from evaluation import mean_over_ranks
from flags import parse_args
from float8 import apply_float8
from model import GPT, initialize
from optimizer import make_optimizer
from parallelize import spread_model
from replicas import check_replicas
from step import train_step
from torch.distributed.tensor import DTensor
from workers.gpt_masks import Dropping
from workers.place import worker_of_test

STEPS, BATCH, LENGTH, VOCABULARY, LR = 2, 16, 16, 44, 0.01
SIZES = f"--layers 2 --heads 4 --dim 24 --block-size {LENGTH} --batch-size {BATCH} --lr {LR}"
LLAMA = "--architecture llama --kv-heads 2 --mlp-dim 32"
# What changes the result, and so has a reference of its own.
KINDS = {
    "sgd": ("--clip 0", "sgd"),
    "adamw": ("--clip 0", "adamw"),
    "clip": ("--clip 0.1", "sgd"),
    "tied": ("--clip 0.1 --tied", "adamw"),
    "deep": ("--clip 0.1 --layers 5", "sgd"),
    "bf16": ("--clip 0 --precision bf16", "sgd"),
    "llama": (f"--clip 0.1 {LLAMA} --window 5", "adamw"),
    "padded": ("--clip 0.1 --tied --pad-vocab-to 48", "adamw"),
    "smollm": (f"--clip 0.1 {LLAMA} --tied --layers 5", "sgd"),
    "grouped": (f"--clip 0.1 {LLAMA}", "sgd"),
    "qwen2": (f"--clip 0.1 {LLAMA} --qkv-bias", "sgd"),
    # Borders of documents at random, in one half of the batch more than in the other.
    "documents": ("--clip 0.1 --document-masks", "sgd"),
    "llama documents": (f"--clip 0.1 {LLAMA} --window 5 --document-masks", "sgd"),
    # Masks from another program: gpt_masks.py.
    "dropout": ("--clip 0.1 --dropout 0.3", "sgd"),
    "deep dropout": (f"--clip 0.1 {LLAMA} --tied --layers 5 --dropout 0.2", "sgd"),
    "dropped documents": ("--clip 0.1 --document-masks --dropout 0.5", "adamw"),
    "qwen": (f"--clip 0.1 {LLAMA} --kv-heads 1 --head-dim 8 --qk-norm", "sgd"),
    # The single process uses the same fp8 layers; test_transformer_basics_float8.py has an oracle.
    "fp8": ("--clip 0.1 --dim 32 --fp8", "sgd"),
    "fp8 bf16": ("--clip 0 --dim 32 --fp8 --precision bf16", "sgd"),
    "fp8 deep": ("--clip 0.1 --dim 32 --fp8 --layers 5", "sgd"),
    "fp8 qwen": (f"--clip 0.1 {LLAMA} --dim 32 --fp8 --kv-heads 1 --head-dim 16 --qk-norm", "sgd"),
}
TP, SP, LP = "--tp {}", "--tp {} --sequence-parallel", "--tp {} --loss-parallel"
ALL = SP + " --loss-parallel"
MESHES = {  # ranks -> flags -> kinds
    2: {
        "": ("sgd", "adamw", "tied", "bf16", "llama", "documents", "dropout", "dropped documents"),
        "--activation-checkpointing --accumulate 4": ("sgd", "dropout"),
        "--dp-shard 2": ("adamw", "clip", "tied", "padded", "bf16", "llama", "qwen", "fp8 bf16"),
        "--dp-shard 2 --accumulate 4": ("clip", "tied", "documents", "llama documents", "dropout"),
        "--dp-shard 2 --accumulate 4 --loss-chunks 5": (
            "documents",
            "dropout",
            "dropped documents",
        ),
        "--dp-shard 2 --accumulate 4 --reduce-once": ("clip",),
        "--dp-shard 2 --keep-gathered --accumulate 2": ("clip",),
        "--dp-shard 2 --compile": ("clip",),
        "--dp-shard 2 --activation-checkpointing selective": ("clip", "llama", "dropout", "fp8"),
        "--dp-shard 2 --activation-checkpointing 2 --loss-chunks 5": (
            "clip",
            "tied",
            "bf16",
            "documents",
        ),
        TP.format(2): (
            "sgd",
            "adamw",
            "clip",
            "tied",
            "padded",
            "bf16",
            "llama",
            "qwen",
            "dropout",
        ),
        SP.format(2): ("sgd", "documents", "dropout", "fp8"),
        TP.format(2) + " --compile": ("sgd",),
        LP.format(2): ("clip",),
        ALL.format(2): ("adamw", "tied", "padded", "bf16", "llama", "qwen", "qwen2", "fp8 qwen"),
        ALL.format(2) + " --activation-checkpointing selective": (
            "tied",
            "dropout",
            "fp8",
            "fp8 qwen",
        ),
        ALL.format(2) + " --activation-checkpointing --accumulate 2": (
            "clip",
            "qwen",
            "documents",
            "dropped documents",
        ),
        "--cp 2": ("sgd", "adamw", "tied", "bf16", "grouped", "qwen", "dropout", "fp8"),
        "--cp 2 --accumulate 2": ("clip", "dropout"),
        "--cp 2 --accumulate 4 --reduce-once": ("clip",),
        "--cp 2 --activation-checkpointing --accumulate 2": ("clip", "qwen", "dropout"),
        "--cp 2 --loss-chunks 3 --activation-checkpointing": ("clip", "tied"),
        "--cp 2 --compile": ("clip",),
        ALL.format(2) + " --activation-checkpointing selective --loss-chunks 5": (
            "clip",
            "qwen",
            "documents",
        ),
        LP.format(2) + " --loss-chunks 3": ("tied",),
        "--pp 2 --loss-chunks 5 --activation-checkpointing 2": ("clip", "tied", "documents"),
        "--pp 2": ("sgd", "adamw", "clip", "tied", "bf16", "llama", "smollm", "dropout"),
        "--pp 2 --accumulate 4 --loss-chunks 5": ("clip", "dropout"),
        "--pp 2 --accumulate 8": ("deep",),
        "--pp 2 --accumulate 4 --activation-checkpointing": (
            "clip",
            "documents",
            "dropout",
            "dropped documents",
            "fp8",
        ),
        "--pp 2 --schedule interleaved": ("smollm",),
        "--pp 2 --accumulate 4 --schedule interleaved --activation-checkpointing": (
            "deep",
            "deep dropout",
        ),
        "--pp 2 --accumulate 4 --schedule zero-bubble": (
            "deep",
            "smollm",
            "deep dropout",
            "fp8 deep",
        ),
    },
    4: {
        TP.format(4): ("clip", "llama"),
        ALL.format(4): ("tied", "qwen", "qwen2"),
        "--dp-replicate 2 --dp-shard 2": ("adamw", "clip"),
        "--dp-replicate 2 --dp-shard 2 --accumulate 4": ("clip", "dropout"),
        "--dp-shard 2 " + TP.format(2): ("adamw", "clip"),
        "--dp-shard 2 " + ALL.format(2): ("sgd", "tied", "llama", "qwen", "dropout", "fp8"),
        "--dp-replicate 2 " + TP.format(2): ("clip", "qwen"),
        "--dp-replicate 2 " + ALL.format(2): ("adamw",),
        "--cp 4": ("clip", "grouped"),
        "--dp-replicate 2 --cp 2": ("clip",),
        "--dp-shard 2 --cp 2 --accumulate 4": ("adamw", "qwen"),
        "--cp 2 " + TP.format(2): ("clip", "qwen"),
        "--cp 2 " + ALL.format(2): ("clip", "tied", "grouped", "qwen", "dropout"),
        "--pp 2 --cp 2 --accumulate 4": ("clip", "tied", "qwen", "dropout"),
        "--pp 2 --cp 2 --accumulate 4 --schedule zero-bubble": ("deep",),
        "--pp 4": ("deep", "smollm"),
        "--pp 2 --dp-shard 2": ("adamw", "tied", "documents"),
        "--pp 2 --accumulate 4 " + TP.format(2): ("tied",),
        "--pp 2 --accumulate 4 --dp-shard 2 --schedule interleaved": ("smollm",),
        "--pp 2 --accumulate 4 --cp 2 --schedule zero-bubble": ("smollm",),
        "--pp 2 --accumulate 4 --dp-shard 2 --schedule zero-bubble": ("smollm",),
        "--pp 2 --accumulate 4 --schedule interleaved " + ALL.format(2): ("smollm", "deep dropout"),
        "--pp 2 --accumulate 4 --schedule zero-bubble " + ALL.format(2): ("deep", "smollm"),
        "--pp 2 --accumulate 4 " + ALL.format(2): (
            "clip",
            "tied",
            "padded",
            "qwen",
            "llama documents",
        ),
    },
    8: {  # three_dimensions.py has it without sequence parallelism and clipping
        "--pp 2 --dp-shard 2 " + ALL.format(2): ("clip", "tied", "llama", "qwen", "dropout"),
        "--cp 8": ("clip",),
        "--dp-replicate 2 --dp-shard 2 --cp 2": ("adamw",),
        "--dp-shard 2 --cp 2 " + ALL.format(2): ("clip", "grouped", "dropout"),
        "--pp 2 --cp 2 " + ALL.format(2): ("qwen",),
        "--pp 2 --dp-shard 2 --loss-chunks 5 " + ALL.format(2): ("llama",),
    },
}
# One of each strategy, for `make quick`.
QUICK = {
    2: {
        "": ("adamw",),
        "--dp-shard 2 --accumulate 4 --loss-chunks 5": ("clip",),
        ALL.format(2) + " --activation-checkpointing selective": ("qwen",),
        "--cp 2 --accumulate 2": ("grouped",),
        "--pp 2 --accumulate 4 --loss-chunks 5": ("tied",),
        "--pp 2 --accumulate 4 --schedule zero-bubble": ("smollm",),
    }
}
# The C++ compiler takes most of these cases' time.
RELEASE = {
    2: {
        "--dp-shard 2 --compile": ("documents", "fp8"),
        "--dp-shard 2 --compile --activation-checkpointing": ("dropout",),
        "--accumulate 2 --compile --activation-checkpointing selective --loss-chunks 7": ("qwen",),
        TP.format(2) + " --compile": ("qwen", "fp8"),
        TP.format(2) + " --compile --activation-checkpointing selective": ("dropout",),
        "--cp 2 --compile": ("dropout", "qwen"),
    }
}
if torch.__version__ < "2.13":  # CPUs have no fp8 products yet
    for meshes in (*MESHES.values(), *QUICK.values(), *RELEASE.values()):
        meshes |= {m: [kind for kind in kinds if "fp8" not in kind] for m, kinds in meshes.items()}
CASES = [(n, m, k) for n, meshes in MESHES.items() for m, kinds in meshes.items() for k in kinds]
COMPILED = [(mesh, kind) for mesh, kinds in RELEASE[2].items() for kind in kinds]


def batches(kind: str = ""):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:]
        if "documents" in kind:  # rank i of 2 has the rows i, i + 2, ...: unequal counts
            frequent = torch.tensor([0.6, 0.1, 0.3, 0.0]).repeat(BATCH // 4)[:, None]
            y = y.masked_fill(torch.rand(y.shape, generator=generator) < frequent, -100)
        yield x, y


def settings_of(flags: str) -> Settings:
    sys.argv = ["train.py", *SIZES.split(), *flags.split()]
    return parse_args()


def optimizer_of(name: str, model, settings):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make_optimizer(model, settings)


@torch.no_grad()
def first_values(model, seed: int = 0) -> None:
    """GPT-2's: matrices normal with a deviation of 0.02, those that end a branch 0.02 / sqrt(2 L).

    Each with numbers of its own, which follow from the seed and its name.
    """
    layers = model.config.layers
    for name, p in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind == "bias":
            p.fill_(0.0)
        elif layer.endswith("norm"):
            p.fill_(1.0)
        else:
            ends_branch = layer.endswith("attention.out") or layer.endswith("mlp.contract")
            deviation = 0.02 * (2 * layers) ** -0.5 if ends_branch else 0.02
            own = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            p.copy_(deviation * torch.randn(p.shape, generator=own))


def plain_optimizer(kind: str, model) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = list(model.named_parameters())
    still = [p for name, p in named if name.endswith("bias") or "norm" in name]
    decaying = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def one_process(kind: str) -> dict:
    flags, name = KINDS[kind]
    settings = settings_of(flags.replace("bf16", "fp32"))
    # Rows that pad the vocabulary are no part of this loss, as its logits are cut.
    model = GPT(settings.model(settings.pad_vocab_to or VOCABULARY))
    first_values(model)
    if settings.fp8:
        apply_float8(model, "cpu", torch.float32)
    optimizer = plain_optimizer(name, model)
    found = {"loss": [], "norm": [], "gradients": []}
    dropping = Dropping(model, settings.dropout)
    for step, (x, y) in enumerate(batches(kind)):
        optimizer.zero_grad()
        dropping.step = step
        if "documents" in kind:
            loss = of_each_document(model, x, y, dropping)
        else:
            dropping.rows, dropping.positions = range(BATCH), range(LENGTH)
            logits = model(x)[..., :VOCABULARY]
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        if settings.clip and norm > settings.clip:
            for p in model.parameters():
                p.grad *= settings.clip / norm
        found["norm"].append(norm.item())
        found["loss"].append(loss.item())
        found["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    found["gradients"] = found["gradients"][:: STEPS - 1]
    return found | {"parameters": [{name: p.detach() for name, p in model.named_parameters()}]}


def of_each_document(model, x, y, dropping: Dropping) -> torch.Tensor:
    """The mean loss of all tokens; the model sees one document at a time, from position 0 on.

    (Dropout is by the position in the window.)
    """
    losses = []
    for row, (inputs, targets) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        begin = 0
        for i, target in enumerate(targets):
            if target == -100 or i == LENGTH - 1:
                dropping.rows, dropping.positions = [row], range(begin, i + 1)
                logits = model(torch.tensor([inputs[begin : i + 1]]))[0].log_softmax(-1)
                known = [t for t in targets[begin : i + 1] if t != -100]
                losses += [-logits[j, t] for j, t in enumerate(known)]
                begin = i + 1
    return sum(losses) / len(losses)


materialize, compiled_or_not = parallelize.materialize, one_step.loss_function


meshes_by_shape = {}


def spread(settings, worker):
    """Cases of one shape use one mesh: groups keep their threads, and hundreds of these are slow.

    A case with --compile gets a mesh of its own, and comes before all others. DTensor's caches may
    return a slice of a mesh from an earlier case. torch 2.15 fails to compile with two slices of
    one mesh that are equal, but not the same object ("_get_submesh is not an OpOverload"). It also
    forgets what earlier cases have compiled: torch compiles a function 8 times, then no more.
    """
    config, shape = settings.model(VOCABULARY), settings.mesh_shape()
    if settings.pad_vocab_to:
        config = settings.padded_model(VOCABULARY)
    mesh = None if settings.compile else meshes_by_shape.get(shape)
    if settings.compile:
        torch.compiler.reset()
    mesh, model, pipeline = spread_model(config, settings, worker.device, mesh)
    meshes_by_shape.setdefault(shape, mesh)
    return mesh, initialize(model, seed=0), pipeline


def on_mesh(flags: str, kind: str, worker) -> dict:
    print(f"rank {worker.rank} begins: {flags!r}, {kind}", flush=True)  # one that dies has named it
    more, name = KINDS[kind]
    settings = settings_of(f"{flags} {more}")
    found = {"loss": [], "norm": [], "gradients": []}

    def note_memory(model, device):
        found["had_memory"] = any(not p.is_meta for p in model.parameters())
        return materialize(model, device)

    def note_loss(is_compiled: bool):
        found["loss_is_compiled"] = is_compiled
        return compiled_or_not(is_compiled)

    parallelize.materialize, one_step.loss_function = note_memory, note_loss
    mesh, model, pipeline = spread(settings, worker)
    optimizer, (part, parts) = optimizer_of(name, model, settings), batch_part(mesh)
    # That the flags did something: what rank 0 holds, how often it computes its first MLP in code
    # that is not compiled, how many tokens it has between the layers, whether it has the logits of
    # some of the vocabulary only.
    first_block, found["mlp_calls"] = next(iter(model.blocks.values())), 0
    found["held"] = sum(p.to_local().numel() for p in model.parameters())
    found["axes"], found["ranks"] = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()

    def count(mlp, _) -> None:
        if torch.compiler.is_compiling():  # torch.compile reads only this line
            return
        found["mlp_calls"] += mlp is first_block.mlp

    def note_tokens(block, inputs) -> None:
        found["tokens"] = inputs[0].shape[1]

    def note_output(model, inputs, output) -> None:
        found["logits_are_cut"] = isinstance(output, DTensor)

    for block in model.blocks.values():  # all, so that torch.compile compiles their code once
        block.mlp.register_forward_pre_hook(count)
    if not settings.compile:
        first_block.register_forward_pre_hook(note_tokens)
    model.register_forward_hook(note_output)
    for step, (x, y) in enumerate(batches(kind)):
        x, y = (tensor[part::parts].to(worker.device) for tensor in (x, y))
        loss, norm = train_step(model, pipeline, x, y, optimizer, mesh, settings, step)
        found["loss"].append(mean_over_ranks(loss, mesh))
        found["norm"].append(norm.item())
        if step in (0, STEPS - 1):
            found["gradients"].append(of_all_stages("", model, lambda p: p.grad, settings.pp))
    check_replicas(model, STEPS, worker)  # both copies of a tied weight, too
    return found | {"parameters": [of_all_stages("", model, torch.Tensor.detach, settings.pp)]}


def gathered(worker) -> dict:
    """What FSDP holds gathered, or has on its way, while each unit computes in forward."""
    settings = settings_of("--dp-shard 2 --layers 4")
    mesh, model, _ = spread(settings, worker)
    blocks, found = list(model.blocks.values()), []
    units = [[model.token_embedding, model.position_embedding]]
    units += [[block] for block in blocks] + [[model.norm, model.head]]
    parameters = [[p for m in unit for p in m.parameters()] for unit in units]
    bytes_of = [sum(p.numel() * 4 for p in unit) for unit in parameters]
    places = [next((m, n) for m in u for n, _ in m.named_parameters()) for u in units]

    def look(number: int) -> None:
        freed = [
            i
            for i, (module, name) in enumerate(places[:number])
            if isinstance(module.get_parameter(name), DTensor)
        ]
        begun = sent.nbytes["dp_shard", "all_gather"]
        found.append(begun - sum(bytes_of[i] for i in freed))

    # Of a part of a block: its own hook would run before FSDP's.
    for number, module in enumerate([model.position_embedding, *(b.mlp for b in blocks), None]):
        if module:
            module.register_forward_pre_hook(lambda *_, number=number: look(number))
    model.head.register_forward_pre_hook(lambda *_: look(len(units) - 1))
    with CountByAxis(mesh) as sent:
        model(next(batches())[0].to(worker.device))
    return {"found": found, "units": bytes_of}


def keeps_gathered(flags: str, worker) -> bool:
    """Whether the first block's parameters are still there, not sharded, after its forward."""
    settings = settings_of(f"--dp-shard 2 {flags}")
    _, model, _ = spread(settings, worker)
    model(next(batches())[0].to(worker.device))
    return not isinstance(next(model.blocks["0"].parameters()), DTensor)


def traffic(flags: str, worker) -> "Reductions":
    """What the second step with FSDP over 2 ranks sends."""
    settings = settings_of(f"--dp-shard 2 {flags}")
    mesh, model, pipeline = spread(settings, worker)
    optimizer, (part, parts) = make_optimizer(model, settings), batch_part(mesh)
    x, y = (tensor[part::parts].to(worker.device) for tensor in next(batches()))
    for _ in range(2):
        with Reductions(mesh) as sent:
            train_step(model, pipeline, x, y, optimizer, mesh, settings)
    return sent


class Reductions(CountByAxis):
    """Also the bytes of each reduce_scatter over dp_shard, in their order."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.in_order = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self.nbytes["dp_shard", "reduce_scatter"]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        after = self.nbytes["dp_shard", "reduce_scatter"]
        self.in_order += [after - before] if after > before else []
        return result


def main(output: str, cases: str) -> None:
    with worker_of_test(gpu_per_rank=True) as worker:
        named = {"all": MESHES, "quick": QUICK, "release": RELEASE}
        meshes, results = named[cases][worker.world_size], {}
        for mesh in sorted(meshes, key=lambda flags: "--compile" not in flags):  # see `spread`
            results |= {(mesh, kind): on_mesh(mesh, kind, worker) for kind in meshes[mesh]}
        if worker.world_size == 2 and cases == "all":
            results["gathered"] = gathered(worker)
            flags = ("", "--accumulate 4", "--accumulate 4 --reduce-once", "--precision bf16")
            flags += ("--tied",)
            results["reductions"] = {each: traffic(each, worker).in_order for each in flags}
            results["kept"] = [keeps_gathered(flags, worker) for flags in ("", "--keep-gathered")]
        if worker.world_size == 4:
            sent = traffic("--pp 2 --accumulate 4", worker)
            results["gatherings"] = sent.calls["dp_shard", "all_gather"]
        if worker.is_main:
            torch.save(results, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
