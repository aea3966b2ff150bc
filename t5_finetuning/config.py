"""The flags of train.py, checked when parsed."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import DEVICE_HELP, DEVICES, ArgumentParser, above, at_least, between

# A run may continue with other values of these flags: they change how it runs, not its results.
# (More --epochs make it longer. The number of ranks may also change. The files have checksums.)
MAY_CHANGE = {
    "train_file",
    "eval_file",
    "data_dir",
    "epochs",
    "name_epochs",
    "accumulate",
    "reduce_once",
    "activation_checkpointing",
    "device",
    "backend",
    "workers",
    "timeout",
    "output_dir",
    "checkpoint_every",
    "keep",
    "log_every",
    "tensorboard",
    "profile",
    "show",
    "patience",
}


@dataclass(frozen=True)
class Settings:
    """The defaults of the flags; `python train.py --help` says what each means."""

    model: str | None = None
    train_file: Path | None = None
    eval_file: Path | None = None
    data_dir: Path = Path("data")
    prefix: str = ""
    max_source: int = 48
    max_target: int = 24
    dim: int = 128
    layers: int = 2
    vocab_size: int = 4096
    epochs: int = 15
    name_epochs: int = 7
    patience: int = 3
    batch_size: int = 32  # global: over all ranks
    accumulate: int = 1
    reduce_once: bool = False
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    dropout: float = 0.1
    precision: str = "fp32"
    activation_checkpointing: bool = False
    seed: int = 0
    device: str = "auto"
    backend: str | None = None
    workers: int = 0
    timeout: float = 600
    output_dir: Path | None = None
    checkpoint_every: int = 0
    keep: int = 2
    log_every: int = 50
    tensorboard: bool = False
    profile: bool = False
    eval_samples: int = 200
    show: int = 8

    def identity(self) -> dict[str, object]:
        """All settings that a continued run must not change."""
        values = {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def parse_args() -> Settings:
    parser = ArgumentParser(description="Fine-tune a T5 for summaries, sharded by FSDP2.")
    add = parser.add_argument_group("data and model").add_argument
    add("--model", help="id on the Hugging Face hub or local directory (default: a new small T5)")
    add("--train-file", type=Path, help='lines of {"text": ..., "summary": ...} to train on')
    add("--eval-file", type=Path, help="lines to evaluate (default of both: the standard library)")
    add("--data-dir", type=Path, help="folder for pairs of the standard library (default: data)")
    add("--prefix", help="text to put before each source, such as 'summarize: '")
    add("--max-source", type=at_least(1), help="tokens of a text, cut to N (default: 48)")
    add("--max-target", type=at_least(1), help="tokens of a summary (default: 24)")
    add("--dim", type=at_least(32), help="width of a new T5, a multiple of 32 (default: 128)")
    add("--layers", type=at_least(1), help="layers of each stack of a new T5 (default: 2)")
    add("--vocab-size", type=at_least(300), help="most tokens of a new T5 (default: 4096)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=at_least(1), help="passes over the data (default: 15)")
    add("--name-epochs", type=at_least(0), help="first epochs of a new T5, on names (default: 7)")
    add("--patience", type=at_least(1), help="stop after N epochs without progress (default: 3)")
    add("--batch-size", type=at_least(1), help="pairs per step over all ranks (default: 32)")
    add("--accumulate", type=at_least(1), help="micro-batches to accumulate per step (default: 1)")
    once = "with --accumulate: reduce once per step, and hold unsharded gradients until then"
    add("--reduce-once", action="store_true", help=once)
    add("--lr", type=above(0), help="peak learning rate (default: 0.002)")
    add(
        "--weight-decay",
        type=between(0, math.inf),
        help="weight decay of matrices only (default: 0.01)",
    )
    add("--warmup", type=between(0, 1), help="fraction of steps for linear warmup (default: 0.05)")
    add("--clip", type=between(0, math.inf), help="clip the gradient norm (0: never; default: 1)")
    add("--dropout", type=between(0, 0.99), help="probability of dropping an activation")
    add("--precision", choices=("fp32", "bf16"), help="dtype of matmuls; parameters stay fp32")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    add("--seed", type=at_least(0), help="seed of weights and data")
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
    add("--keep", type=at_least(1), help="keep the newest N checkpoints (default: 2)")
    add("--log-every", type=at_least(1), help="log every N steps (default: 50)")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    add("--profile", action="store_true", help="trace three steps to OUTPUT_DIR/trace_RANK.json")
    add("--eval-samples", type=at_least(1), help="summaries to generate (default: 200)")
    add("--show", type=at_least(0), help="summaries to print (default: 8)")
    parser.set_defaults(**asdict(Settings()))
    settings = Settings(**vars(parser.parse_args()))

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if settings.batch_size % (ranks * settings.accumulate):
        parser.error(
            f"--batch-size {settings.batch_size} does not divide into "
            f"{ranks * settings.accumulate} equal parts "
            f"({ranks} rank(s) x --accumulate {settings.accumulate})"
        )
    if settings.dim % 32:
        parser.error(f"--dim must be a multiple of 32, not {settings.dim}")
    if bool(settings.train_file) != bool(settings.eval_file):
        parser.error("--train-file and --eval-file go together: one was given")
    for name in ("checkpoint_every", "keep", "tensorboard", "profile"):
        if getattr(settings, name) != getattr(Settings, name) and not settings.output_dir:
            parser.error(f"--{name.replace('_', '-')} needs an --output-dir to write to")
    parser.make_folder("--output-dir", settings.output_dir)
    return settings
