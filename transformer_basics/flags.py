"""The flags of train.py; their defaults are in config.py."""

import argparse
import math
import os
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from activation_checkpointing import CHECKPOINTING
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least, between
from config import PRECISIONS, SCHEDULES, Settings
from presets import PRESETS


def with_preset(parser: ArgumentParser) -> dict:
    """The values of the flags; the shape of --preset takes the place of their defaults."""
    parser.set_defaults(**PRESETS.get(parser.parse_args().preset, {}))
    values = vars(parser.parse_args())
    del values["preset"]  # a run is known by what it means
    scaling = values.get("rope_scaling")
    return values | {"rope_scaling": tuple(scaling) if scaling else None}


def parse_args() -> Settings:
    parser = ArgumentParser(description="Train a GPT on a mesh of devices.")
    add = parser.add_argument_group("data").add_argument
    sources = "text files, or a folder of prepare.py (default: Python's standard library)"
    add("--data", nargs="+", type=Path, help=sources)
    add("--tokenizer", help="id on the Hugging Face hub or directory (default: bytes as tokens)")
    masks = "keep attention and loss within each document of a window"
    add("--document-masks", action="store_true", help=masks)
    add("--init-from", help="start from the weights of a model: id on the hub or directory")
    rows = "rows of the embedding, at least one per token (default: a multiple of 64 and --tp)"
    add("--pad-vocab-to", type=at_least(1), help=rows)
    adapters = "train adapters of rank N next to frozen weights (default: train all weights)"
    add("--lora-rank", type=at_least(1), help=adapters)
    add("--lora-alpha", type=above(0), help="scale adapters by X / rank (default: twice the rank)")
    add = parser.add_argument_group("model").add_argument
    add("--layers", type=at_least(1), help="transformer blocks")
    add("--heads", type=at_least(1), help="attention heads")
    add("--dim", type=at_least(1), help="width of the model (default: 96)")
    add("--block-size", type=at_least(1), help="tokens per sequence (default: 128)")
    tied = "use the token embedding's weight in the head"
    add("--tied", action=argparse.BooleanOptionalAction, help=tied)
    add("--preset", choices=PRESETS, help="the shape of this model; other flags override it")
    blocks = "gpt2, or llama: RMSNorm, rotary positions, SwiGLU, no biases (default: gpt2)"
    add("--architecture", choices=("gpt2", "llama"), help=blocks)
    add("--kv-heads", type=at_least(1), help="heads of keys and values (default: --heads)")
    add("--head-dim", type=at_least(1), help="width of a head (default: --dim / --heads)")
    add("--mlp-dim", type=at_least(1), help="width inside the MLP (default: 4 x --dim)")
    biases = "add biases to queries, keys and values of a llama, as Qwen2.5"
    add("--qkv-bias", action=argparse.BooleanOptionalAction, help=biases)
    normalized = "normalize each head of queries and keys, as Qwen3"
    add("--qk-norm", action=argparse.BooleanOptionalAction, help=normalized)
    add("--window", type=at_least(1), help="tokens that a token attends to (default: all)")
    add("--norm-eps", type=above(0), help="added to variances in norms")
    add("--rope-theta", type=above(0), help="base of rotary positions")
    add(
        "--rope-scaling",
        type=above(0),
        nargs=4,
        metavar=("FACTOR", "LOW", "HIGH", "LENGTH"),
        help="Llama 3's scaling of rotary positions",
    )
    group = parser.add_argument_group("training")
    add, length = group.add_argument, group.add_mutually_exclusive_group().add_argument
    length("--steps", type=at_least(1), help="steps of the run (default: 2000)")
    length("--tokens", type=at_least(1), help="train on N tokens, rounded up to a step")
    add("--batch-size", type=at_least(1), help="sequences per step over all ranks (default: 16)")
    add("--accumulate", type=at_least(1), help="micro-batches per rank and step (default: --pp)")
    once = "with --accumulate: reduce once per step, and hold unsharded gradients until then"
    add("--reduce-once", action="store_true", help=once)
    add("--lr", type=above(0), help="peak learning rate (default: 0.005)")
    add("--warmup", type=between(0, 1), help="fraction of steps for linear warmup (default: 0.05)")
    add(
        "--weight-decay",
        type=between(0, math.inf),
        help="weight decay of matrices (default: 0.1)",
    )
    add("--clip", type=between(0, math.inf), help="clip the gradient norm (0: never; default: 1)")
    dropped = "drop this share of embeddings and of what attention and MLP add (default: 0)"
    add("--dropout", type=between(0, 0.99), help=dropped)
    add("--precision", choices=PRECISIONS, help="dtype of matmuls; parameters stay fp32")
    float8 = "multiply in fp8 in the linear layers of the blocks (measure first: running.md)"
    add("--fp8", action="store_true", help=float8)
    add("--activation-checkpointing", **CHECKPOINTING)
    flex = "on GPUs, compute no scores that --document-masks or --window hides (experimental)"
    add("--flex-attention", action="store_true", help=flex)
    chunks = "compute the logits and the loss in N chunks of the tokens (default: 1)"
    add("--loss-chunks", type=at_least(1), help=chunks)
    add("--compile", action="store_true", help="torch.compile each block")
    add("--seed", type=at_least(0), help="seed of weights and data")
    add = parser.add_argument_group("parallelism").add_argument
    add("--pp", type=at_least(1), help="pipeline stages (default: 1)")
    order = "order of forward and backward in a pipeline (default: 1f1b)"
    add("--schedule", choices=SCHEDULES, help=order)
    several = "stages per rank (default: 1 with 1f1b, else 2)"
    add("--stages-per-rank", type=at_least(1), help=several)
    replicas = "replicas (default: ranks / (pp x dp-shard x cp x tp))"
    add("--dp-replicate", type=at_least(1), help=replicas)
    add("--dp-shard", type=at_least(1), help="FSDP shards per replica (default: 1)")
    add("--cp", type=at_least(1), help="context-parallel shards of each sequence (default: 1)")
    kernel = "with --cp: ring attention by hand, or torch's with fused GPU kernels (default: ring)"
    add("--cp-kernel", choices=("ring", "torch"), help=kernel)
    add("--tp", type=at_least(1), help="tensor-parallel shards of each layer (default: 1)")
    tokens = "with --tp: shard the tokens between the tensor-parallel layers"
    add("--sequence-parallel", action="store_true", help=tokens)
    add("--loss-parallel", action="store_true", help="with --tp: never gather the logits")
    add("--keep-gathered", action="store_true", help="do not reshard after forward (ZeRO-2)")
    add = parser.add_argument_group("hardware").add_argument
    add("--device", choices=DEVICES, help=DEVICE_HELP)
    add("--backend", help="backend of collectives (default: nccl on CUDA GPUs, gloo on CPUs)")
    add("--timeout", type=above(0), help="seconds to wait for a missing rank (default: 600)")
    shorter = "the same after the first step, which is the slowest (default: --timeout)"
    add("--train-timeout", type=above(0), help=shorter)
    collect = "collect Python's garbage every N steps, on all ranks at once (0: when Python likes)"
    add("--gc-every", type=at_least(0), help=collect + " (default: 100)")
    group = parser.add_argument_group("output")
    add, evaluate = group.add_argument, group.add_mutually_exclusive_group().add_argument
    add("--output-dir", type=Path, help="write checkpoints and logs here; resume what is there")
    add(
        "--checkpoint-every",
        type=at_least(1),
        help="save every N steps and after the last (default: 250)",
    )
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep", type=at_least(1), help="keep the newest N checkpoints (default: 2)")
    add("--log-every", type=at_least(1), help="log every N steps (default: 50)")
    evaluate(
        "--eval-every",
        type=at_least(1),
        help="evaluate every N steps and after the last (default: 250)",
    )
    evaluate("--eval-tokens", type=at_least(1), help="evaluate every N tokens, rounded to steps")
    add("--eval-batches", type=at_least(1), help="held-out batches to evaluate (default: 16)")
    add("--tensorboard", action="store_true", help="also write OUTPUT_DIR/tensorboard")
    add("--profile", action="store_true", help="trace three steps to OUTPUT_DIR/trace_RANK.json")
    add("--prompt", help="text that the sample at the end continues")
    add("--sample", type=at_least(0), help="tokens to generate at the end (default: 300)")
    parser.set_defaults(**asdict(Settings()))
    settings = Settings(**with_preset(parser))

    try:
        settings = settings.on(int(os.environ.get("WORLD_SIZE", 1)))
    except UserError as error:
        parser.error(str(error))
    for name in ("checkpoint_every", "async_save", "keep", "tensorboard", "profile"):
        if getattr(settings, name) != getattr(Settings, name) and not settings.output_dir:
            parser.error(f"--{name.replace('_', '-')} needs an --output-dir to write to")
    if settings.train_timeout and not hasattr(dist, "set_timeout"):
        parser.error("--train-timeout needs torch 2.15 or later")
    if settings.lora_alpha and not settings.lora_rank:
        parser.error("--lora-alpha needs --lora-rank")
    if settings.lora_rank and not settings.init_from:
        parser.error("--lora-rank needs --init-from, the weights that stay frozen")
    if not settings.prompt:
        parser.error("--prompt is empty: the model continues at least one character")
    parser.make_folder("--output-dir", settings.output_dir)
    return settings
