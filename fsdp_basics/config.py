"""The flags of train.py: those of the task and those of the training, checked when parsed."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, above, at_least, between
from task import TaskSettings, add_flags

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A run may continue with other values of these flags: they change how it runs, not its results.
# (More --epochs make it longer. The number of ranks and all paths may also change. But BatchNorm
# normalizes over a rank's micro-batch: its results depend on the number of ranks and --accumulate.)
MAY_CHANGE = {
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
        """All settings that a continued run must not change."""
        values = {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}
        values = {name: value for name, value in values.items() if not isinstance(value, Path)}
        return json.loads(json.dumps(values, default=str))  # what any checkpoint can hold


def parse_args() -> Settings:
    parser = ArgumentParser(description="Train a model with FSDP: its parameters are sharded.")
    add_flags(parser.add_argument_group("task").add_argument)
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=at_least(1), help="passes over the data (default: 20)")
    add("--batch-size", type=at_least(1), help="samples per step over all ranks (default: 64)")
    add("--accumulate", type=at_least(1), help="micro-batches to accumulate per step (default: 1)")
    add("--optimizer", choices=("adamw", "sgd"), help="sgd has momentum 0.9 (default: adamw)")
    add("--lr", type=above(0), help="peak learning rate (default: 0.003)")
    add("--warmup", type=between(0, 1), help="fraction of steps for linear warmup (default: 0.1)")
    add(
        "--weight-decay",
        type=between(0, math.inf),
        help="weight decay of matrices only (default: 0.01)",
    )
    add("--clip", type=between(0, math.inf), help="clip the gradient norm (0: never; default: 1)")
    add("--precision", choices=PRECISIONS, help="compute dtype; shards stay fp32 (default: fp32)")
    add("--compile", action="store_true", help="torch.compile each FSDP unit")
    seeded = "seed of weights, data order, augmentation, dropout (default: 0)"
    add("--seed", type=at_least(0), help=seeded)
    add = parser.add_argument_group("sharding").add_argument
    add("--dp-replicate", type=at_least(1), help="replicas of the sharded model (default: 1)")
    add(
        "--keep-gathered",
        action="store_true",
        help="gather once per micro-batch, not twice (ZeRO-2)",
    )
    once = "with --accumulate: reduce once per step, and hold unsharded gradients until then"
    add("--reduce-once", action="store_true", help=once)
    add("--offload", action="store_true", help="keep shards and optimizer in CPU memory")
    add("--prefetch", type=at_least(0), help="units to gather ahead (default 0: FSDP decides)")
    add = parser.add_argument_group("hardware").add_argument
    add("--device", choices=DEVICES, help=DEVICE_HELP)
    add("--backend", help="backend of collectives (default: nccl on CUDA GPUs, gloo on CPUs)")
    add("--workers", type=at_least(0), help="DataLoader workers per rank (default: 0)")
    add("--timeout", type=above(0), help="seconds to wait for a missing rank (default: 600)")
    add = parser.add_argument_group("output").add_argument
    add("--output-dir", type=Path, help="write checkpoints and logs here; resume what is there")
    add(
        "--checkpoint-every",
        type=at_least(0),
        help="save every N steps (0: each epoch; default: 0)",
    )
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep", type=at_least(1), help="keep the newest N checkpoints (default: 2)")
    add("--log-every", type=at_least(1), help="log every N steps (default: 50)")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    add("--profile", action="store_true", help="trace three steps to OUTPUT_DIR/trace_RANK.json")
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
    if settings.offload and settings.precision == "fp16":
        # GradScaler copies 1 / scale from the GPU with non_blocking=True, and the CPU does not wait
        # for the copy before it multiplies the offloaded gradients by it (torch 2.11 to 2.15).
        parser.error(
            "--offload does not work with --precision fp16: GradScaler may read its scale on the "
            "CPU before the copy from the GPU has arrived; use bf16, which needs no scaler"
        )
    for name in ("checkpoint_every", "async_save", "keep", "tensorboard", "profile"):
        if getattr(settings, name) != getattr(Settings, name) and not settings.output_dir:
            parser.error(f"--{name.replace('_', '-')} needs an --output-dir to write to")
    parser.make_folder("--output-dir", settings.output_dir)
    return settings
