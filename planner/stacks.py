"""The constants of a software on a GPU: what was fitted, and what is known of the software."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("stacks.toml")


@dataclass(frozen=True)
class Stack:
    """At most six constants of time are fitted per stack (`fitted` of stacks.toml names them)."""

    # Time.
    gemm_efficiency: float = 0.65  # of the peak, by the matrix products
    attention_cost: float = 1.0  # attention's FLOPs take so much longer than those of a product
    memory_passes: float = 9.0  # each kept byte crosses HBM so often, forward and backward
    launch_s: float = 2.5e-3  # the host's time for a layer, forward and backward
    fixed_s: float = 20e-3  # per step, whatever the mesh
    hop_s: float = 15e-6  # latency of a hop of a ring inside a node
    fp8_speed: float = 1.6  # of fp8 products, in bf16 products
    tp_overlap: float = 0.0  # share of the TP rings that runs during products
    dp_overlap: float = 0.0  # share of the DP or FSDP rings that runs during layers
    pipelined_launch_s: float = 0.0  # of a layer, per TP rank, in a pipeline across nodes
    # Memory.
    activation_factor: float = 1.0  # bytes kept, in bytes of the formula
    base_gib: float = 0.5  # what is there before the model: CUDA context, NCCL, workspaces
    # Known of the software, not fitted.
    gradient_bytes: float = 4  # that a gradient has on the wire
    resident_bytes: float = 6  # per parameter: bf16 weight, fp32 gradient
    optimizer_bytes: float = 12  # per parameter: fp32 weight, two moments
    logit_bytes: float = 10  # per logit: bf16, fp32, and its gradient
    logit_traffic_bytes: float = 20  # per logit, forward and backward; unfused fp32: 40
    gathered_bytes: float = 0  # per unit of width: gathered inputs that are kept under SP
    selective_bytes: float = 1.0  # share that selective checkpointing keeps, scores apart
    balanced: int = 0  # 1: the stages have equal work, the output layer counted


def load(path: Path = FILE) -> dict[str, tuple[Stack, dict]]:
    """name -> (constants, everything else that the file says of the stack)."""
    names = {field.name for field in dataclasses.fields(Stack)}
    stacks = {}
    for name, table in tomllib.loads(path.read_text()).items():
        constants = {key: value for key, value in table.items() if key in names}
        rest = {key: value for key, value in table.items() if key not in names}
        stacks[name] = Stack(**constants), rest
    return stacks


def choose(stacks: dict, family: str, software: str, gpu: str) -> str:
    """The stack that fits a row best: of its family, else of its software, on its GPU if there is
    one; "generic" where no row backs any of it."""
    known = {name: rest for name, (_, rest) in stacks.items()}
    here = [name for name, rest in known.items() if family in rest.get("families", ())]
    here = here or [name for name, rest in known.items() if software in rest.get("software", ())]
    same_gpu = [name for name in here if gpu in known[name].get("gpus", ())]
    return (same_gpu or here or ["generic"])[0]
