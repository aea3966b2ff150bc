"""What train.py can be told: a flag for each of the settings, checked where it is read."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from arguments import ArgumentParser, above, at_least, between
from data import DATASETS
from runtime import known_backend

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """The defaults of the flags; `python train.py --help` says what each means."""

    dataset: str = "digits"
    data_dir: Path = Path("data")
    augment: bool = False
    epochs: int = 20
    batch_size: int = 64  # global: over all ranks
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 3e-3
    warmup: float = 0.1
    clip: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    dim: int = 96
    depth: int = 3
    keep_gathered: bool = False
    activation_checkpointing: bool = False
    offload: bool = False
    prefetch: int = 0
    device: str = "auto"
    backend: str | None = None
    workers: int = 0
    timeout: float = 600
    output_dir: Path | None = None
    checkpoint_every: int = 0
    keep: int = 2
    log_every: int = 50
    tensorboard: bool = False
    tracker: str | None = None
    profile: bool = False

    def identity(self) -> dict[str, object]:
        """What makes two runs the same run: a checkpoint continues under the same values only.

        The number of ranks is not among them, nor --epochs: a run can be made longer.
        """
        names = "dataset augment batch_size optimizer lr warmup clip precision seed dim depth"
        return {name: getattr(self, name) for name in names.split()}


def parse_args() -> Settings:
    parser = ArgumentParser(
        description="Train a vision transformer on handwritten digits with FSDP."
    )
    add = parser.add_argument
    # what is learned
    add("--dataset", choices=DATASETS)
    add("--data-dir", type=Path, help="where MNIST is, or is to be downloaded to")
    add("--augment", action="store_true", help="move each image by up to a pixel, anew each epoch")
    # how
    add("--epochs", type=at_least(1), help="a run can be continued with more of them")
    add("--batch-size", type=at_least(1), help="images per optimizer step, over all ranks")
    add("--accumulate", type=at_least(1), help="parts in which a rank works through its batch")
    add("--optimizer", choices=("adamw", "sgd"))
    add("--lr", type=above(0), help="peak learning rate")
    add("--warmup", type=between(0, 1), help="fraction of all steps until the peak")
    add("--clip", type=between(0, math.inf), help="largest gradient norm; 0: no clipping")
    add("--precision", choices=PRECISIONS)
    add("--compile", action="store_true", help="torch.compile each block")
    add("--seed", type=int)
    # which model, and how it is sharded
    add("--dim", type=at_least(4), help="width of the model, a multiple of 4")
    add("--depth", type=at_least(1), help="blocks")
    add("--keep-gathered", action="store_true", help="no second gathering in backward (ZeRO-2)")
    add("--activation-checkpointing", action="store_true", help="compute activations twice")
    add("--offload", action="store_true", help="shards and optimizer in CPU memory")
    add("--prefetch", type=at_least(0), help="blocks to gather ahead; 0: FSDP's choice")
    # on what
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--backend", type=known_backend, help="gloo, nccl, or a module's: runtime.py")
    add("--workers", type=at_least(0), help="processes per rank that load data")
    add("--timeout", type=above(0), help="seconds after which a missing rank is an error")
    # what is kept
    add("--output-dir", type=Path, help="checkpoints and metrics; continues a run that is there")
    add("--checkpoint-every", type=at_least(0), help="steps; 0: at the end of each epoch")
    add("--keep", type=at_least(1), help="newest checkpoints to keep: one may turn out broken")
    add("--log-every", type=at_least(1), help="steps between lines of the log")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    add("--tracker", choices=("wandb", "mlflow"), help="also send metrics there, if installed")
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
    if settings.dim % 4:
        parser.error(f"--dim {settings.dim} does not divide into 4 attention heads")
    if (settings.tensorboard or settings.profile) and not settings.output_dir:
        parser.error("--tensorboard and --profile need an --output-dir to write to")
    parser.make_folder("--output-dir", settings.output_dir)
    return settings
