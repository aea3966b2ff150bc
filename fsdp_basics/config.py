"""The settings of train.py: a flag for each, of the task and of the training, checked when read."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from arguments import DEVICES, ArgumentParser, above, at_least, between
from task import TaskSettings, add_flags

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A continued run may change these settings: they change how it runs, not what it computes.
# (It may also become longer, and continue on another number of ranks.)
MAY_CHANGE = {
    "data_dir",
    "epochs",
    "accumulate",
    "reduce_once",
    "dp_replicate",
    "keep_gathered",
    "activation_checkpointing",
    "offload",
    "prefetch",
    "compile",
    "device",
    "backend",
    "workers",
    "timeout",
    "output_dir",
    "checkpoint_every",
    "async_save",
    "keep",
    "log_every",
    "tensorboard",
    "profile",
}


@dataclass(frozen=True)
class Settings(TaskSettings):
    """The defaults of the flags; `python train.py --help` says what each means."""

    epochs: int = 20
    batch_size: int = 64  # global: over all ranks
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    dp_replicate: int = 1
    keep_gathered: bool = False
    reduce_once: bool = False
    offload: bool = False
    prefetch: int = 0
    device: str = "auto"
    backend: str | None = None
    workers: int = 0
    timeout: float = 600
    output_dir: Path | None = None
    checkpoint_every: int = 0
    async_save: bool = False
    keep: int = 2
    log_every: int = 50
    tensorboard: bool = False
    profile: bool = False

    def identity(self) -> dict[str, object]:
        """The settings that a continued run must not change."""
        values = {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def parse_args() -> Settings:
    parser = ArgumentParser(description="Train a model with FSDP: its parameters are sharded.")
    add = parser.add_argument
    add_flags(add)  # the task's own
    # how
    add("--epochs", type=at_least(1), help="passes over the data (a continued run may have more)")
    add("--batch-size", type=at_least(1), help="samples per optimizer step, over all ranks")
    add("--accumulate", type=at_least(1), help="micro-batches per rank and optimizer step")
    add("--optimizer", choices=("adamw", "sgd"), help="adamw, or sgd with momentum 0.9")
    add("--lr", type=above(0), help="peak learning rate")
    add("--warmup", type=between(0, 1), help="fraction of all steps until the peak rate")
    add("--weight-decay", type=between(0, math.inf), help="decay of matrices; biases do not decay")
    add("--clip", type=between(0, math.inf), help="largest gradient norm (0: no clipping)")
    add("--precision", choices=PRECISIONS, help="dtype of forward and backward; shards are fp32")
    add("--compile", action="store_true", help="torch.compile each FSDP unit")
    add("--seed", type=int, help="seed of initial values, data order, augmentation, dropout")
    # how the model is sharded
    add("--dp-replicate", type=at_least(1), help="replicas of the sharded model (HSDP)")
    add("--keep-gathered", action="store_true", help="gather once per step, not twice (ZeRO-2)")
    once = "with --accumulate: reduce once per step, and hold unsharded gradients until then"
    add("--reduce-once", action="store_true", help=once)
    add("--offload", action="store_true", help="keep shards and optimizer in CPU memory")
    add("--prefetch", type=at_least(0), help="units to gather ahead (0: FSDP decides)")
    # on what
    add("--device", choices=DEVICES)
    add("--backend", help="gloo, nccl, ... (default: nccl on CUDA GPUs, gloo on CPUs)")
    add("--workers", type=at_least(0), help="processes per rank that load data")
    add("--timeout", type=above(0), help="seconds until a missing rank is an error")
    # what is kept
    add("--output-dir", type=Path, help="checkpoints and metrics; a run found there continues")
    add("--checkpoint-every", type=at_least(0), help="save every N steps (0: after each epoch)")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep", type=at_least(1), help="number of checkpoints to keep, the newest ones")
    add("--log-every", type=at_least(1), help="steps between log lines")
    add("--tensorboard", action="store_true", help="also log to OUTPUT_DIR/tensorboard")
    add("--profile", action="store_true", help="write OUTPUT_DIR/trace_RANK.json of three steps")
    parser.set_defaults(**asdict(Settings()))
    settings = Settings(**vars(parser.parse_args()))

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if settings.batch_size % (ranks * settings.accumulate):
        parser.error(
            f"--batch-size {settings.batch_size} does not divide into "
            f"{ranks * settings.accumulate} equal parts "
            f"({ranks} rank(s) x --accumulate {settings.accumulate})"
        )
    if ranks % settings.dp_replicate:
        parser.error(f"--dp-replicate {settings.dp_replicate} does not divide {ranks} rank(s)")
    if (settings.tensorboard or settings.profile) and not settings.output_dir:
        parser.error("--tensorboard and --profile need an --output-dir to write to")
    parser.make_folder("--output-dir", settings.output_dir)
    return settings
