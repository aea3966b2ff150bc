"""The flags of train.py, and what must hold between them."""

import math
import os
from pathlib import Path

import torch
from arguments import ArgumentParser

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # of the device mesh
PROMPT = "import os\n\n\ndef "  # a bare "def " might as well be English


def parse_args():
    parser = ArgumentParser(description="Train a GPT on a mesh of devices.")
    add = parser.add_argument
    add("--data", nargs="+", default=[], help="text files; default: Python's standard library")
    add("--tokenizer", help="id on the Hugging Face hub or directory; default: one token a byte")
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--dim", type=int, default=96, help="width of the model")
    add("--block-size", type=int, default=128, help="tokens of a sequence")
    add("--tied", action="store_true", help="the head uses the token embedding's weight")
    add("--steps", type=int, default=2000)
    add("--batch-size", type=int, default=16, help="sequences per optimizer step, over all ranks")
    add("--accumulate", type=int, help="parts of a rank's share: micro-batches; default: --pp")
    add("--lr", type=float, default=5e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="fraction of all steps until the peak")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp-replicate", type=int, help="copies of the model; default: all ranks that are left")
    add("--dp-shard", type=int, default=1, help="shards of each copy (FSDP)")
    add("--tp", type=int, default=1, help="parts of each layer (tensor parallelism)")
    add("--sequence-parallel", action="store_true", help="with --tp: cut the tokens between layers")
    add("--loss-parallel", action="store_true", help="with --tp: never gather the logits")
    add("--keep-gathered", action="store_true", help="no second gathering in backward (ZeRO-2)")
    add("--activation-checkpointing", action="store_true", help="compute activations twice")
    add("--compile", action="store_true", help="torch.compile each block")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, help="checkpoint and metrics; continues a run that is there")
    add("--checkpoint-every", type=int, default=250, help="steps; and at the end")
    add("--eval-every", type=int, default=250, help="steps; and at the end")
    add("--eval-batches", type=int, default=16, help="held-out batches")
    add("--log-every", type=int, default=10, help="steps between losses, and looks at SIGTERM")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    add("--profile", action="store_true", help="write OUTPUT_DIR/trace_RANK.json of three steps")
    add("--prompt", default=PROMPT, help="how the sample at the end begins")
    add("--sample", type=int, default=300, help="tokens to write at the end")
    args = parser.parse_args()

    at_least_1 = "layers heads dim block_size steps batch_size pp dp_shard tp checkpoint_every"
    for names, holds, limit in (
        (at_least_1 + " eval_every eval_batches log_every", lambda x: x >= 1, "at least 1"),
        ("accumulate dp_replicate", lambda x: x is None or x >= 1, "at least 1"),
        ("clip weight_decay sample", lambda x: x >= 0, "at least 0"),
        ("lr", lambda x: 0 < x < math.inf, "above 0"),
        ("warmup", lambda x: 0 <= x <= 1, "from 0 to 1"),
    ):
        for name in names.split():
            value, flag = getattr(args, name), "--" + name.replace("_", "-")
            if not holds(value):
                parser.error(f"{flag} must be {limit}, not {value}")
    check_mesh(args, parser, int(os.environ.get("WORLD_SIZE", 1)))
    if (args.tensorboard or args.profile) and not args.output_dir:
        parser.error("--tensorboard and --profile need an --output-dir to write to")
    if not args.prompt:
        parser.error("--prompt is empty: the model continues at least one character")
    if args.output_dir:
        try:
            args.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output-dir {args.output_dir} cannot be made: {error.strerror}")
    return args


def check_mesh(args, parser, ranks: int) -> None:
    """Fill in what follows from the number of ranks; refuse what does not fit it."""
    if args.dp_replicate is None:
        args.dp_replicate = max(1, ranks // (args.pp * args.dp_shard * args.tp))
    if math.prod(getattr(args, axis) for axis in AXES) != ranks:
        sizes = " x ".join(f"--{axis.replace('_', '-')} {getattr(args, axis)}" for axis in AXES)
        parser.error(f"{sizes} do not multiply to the {ranks} rank(s) of this job")
    args.accumulate = args.accumulate or args.pp
    if args.accumulate < args.pp:
        parser.error(
            f"--accumulate {args.accumulate} micro-batches do not fill --pp {args.pp} stages: give "
            "at least as many, better four times as many"
        )
    parts = args.dp_replicate * args.dp_shard * args.accumulate
    for name, value, by, why in (
        ("batch-size", args.batch_size, parts, "data-parallel ranks x --accumulate"),
        ("dim", args.dim, args.heads, "--heads"),
        ("heads", args.heads, args.tp, "--tp"),
        ("block-size", args.block_size, args.tp if args.sequence_parallel else 1, "--tp"),
    ):
        if value % by:
            parser.error(f"--{name} {value} does not divide by {by} ({why})")
    if args.layers < args.pp:
        parser.error(f"--layers {args.layers} are too few for --pp {args.pp} stages")
    if args.tied and args.pp > 1:
        parser.error(
            "--tied does not work with --pp: the first and last stage would share a weight"
        )
    if args.tp == 1 and (args.sequence_parallel or args.loss_parallel):
        parser.error("--sequence-parallel and --loss-parallel need --tp")
