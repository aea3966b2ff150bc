"""The settings of train.py, and checks that they fit one another and the mesh."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from arguments import UserError
from model import GPTConfig

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the device mesh
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")  # of a pipeline
# A run may continue with other values of these flags: they change how it runs, not its results.
# (A checksum of the text is compared, not --data. Only a new run reads --init-from.)
MAY_CHANGE = {
    *AXES,
    "cp_kernel",
    "flex_attention",
    "schedule",
    "stages_per_rank",
    "data",
    "init_from",
    "pad_vocab_to",
    "steps",
    "tokens",
    "accumulate",
    "reduce_once",
    "activation_checkpointing",
    "compile",
    "sequence_parallel",
    "loss_parallel",
    "loss_chunks",
    "keep_gathered",
    "device",
    "backend",
    "timeout",
    "train_timeout",
    "gc_every",
    "output_dir",
    "checkpoint_every",
    "async_save",
    "keep",
    "log_every",
    "eval_every",
    "eval_tokens",
    "eval_batches",
    "tensorboard",
    "profile",
    "prompt",
    "sample",
}
VOCABULARY = ("vocab_size", "token_count")  # of the text or of --init-from; SHAPE is of the flags
SHAPE = [field.name for field in fields(GPTConfig) if field.name not in VOCABULARY]
PROMPT = "import os\n\n\ndef "  # "def " alone could also begin English text


@dataclass(frozen=True)
class Settings:
    """The defaults of the flags; `python train.py --help` says what each means."""

    data: Sequence[Path] = ()
    tokenizer: str | None = None
    document_masks: bool = False
    init_from: str | None = None
    pad_vocab_to: int | None = None
    lora_rank: int | None = None  # None: train all weights
    lora_alpha: float | None = None  # None: twice --lora-rank
    layers: int = 3
    heads: int = 4
    dim: int = 96
    block_size: int = 128
    tied: bool = False
    architecture: str = "gpt2"
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, ...] | None = None
    steps: int = 2000
    tokens: int | None = None  # instead of steps
    batch_size: int = 16  # global: over all ranks
    accumulate: int | None = None
    reduce_once: bool = False
    lr: float = 5e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.0
    precision: str = "fp32"
    fp8: bool = False
    activation_checkpointing: str | int | None = None  # full, selective, every Nth block
    flex_attention: bool = False
    compile: bool = False
    seed: int = 0
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int | None = None  # None: 1 with 1f1b, else 2
    dp_replicate: int | None = None
    dp_shard: int = 1
    cp: int = 1
    cp_kernel: str = "ring"
    tp: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    loss_chunks: int = 1
    keep_gathered: bool = False
    device: str = "auto"
    backend: str | None = None
    timeout: float = 600
    train_timeout: float | None = None  # after the first step
    gc_every: int = 100
    output_dir: Path | None = None
    checkpoint_every: int = 250
    async_save: bool = False
    keep: int = 2
    log_every: int = 50
    eval_every: int = 250
    eval_tokens: int | None = None  # instead of eval_every
    eval_batches: int = 16
    tensorboard: bool = False
    profile: bool = False
    prompt: str = PROMPT
    sample: int = 300

    def identity(self) -> dict[str, object]:
        """All settings that a continued run must not change."""
        return {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}

    def model(self, vocab_size: int, token_count: int | None = None) -> GPTConfig:
        """token_count: how many of the rows of the embedding are tokens; None: all."""
        shape = {name: getattr(self, name) for name in SHAPE}
        return GPTConfig(vocab_size, token_count=token_count, **shape)

    def padded_model(self, token_count: int) -> GPTConfig:
        """The model for this many tokens; its rows are --pad-vocab-to, or divide by 64 and --tp.

        Raises `UserError` if --pad-vocab-to is less than `token_count`.
        """
        step = math.lcm(64, self.tp)
        rows = self.pad_vocab_to or -(-token_count // step) * step
        if rows < token_count:
            raise UserError(
                f"--pad-vocab-to {rows} is less than the {token_count} tokens there are"
            )
        return self.model(rows, token_count)

    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    @property
    def length_multiple(self) -> int:
        """A sequence must be a multiple: each cp rank has two chunks, which tp may shard."""
        tp = self.tp if self.sequence_parallel else 1
        return tp if self.cp == 1 else self.cp * math.lcm(2, tp)

    @property
    def local_stages(self) -> int:
        """Stages of a pipeline on one rank."""
        return self.stages_per_rank or (1 if self.schedule == "1f1b" else 2)

    @property
    def microbatch_size(self) -> int:
        """Sequences that a rank computes at a time."""
        return self.batch_size // (self.dp_replicate * self.dp_shard * self.accumulate)

    def on(self, ranks: int) -> "Settings":
        """The settings with their missing values filled in for this number of ranks.

        They are --dp-replicate, --accumulate, --lora-alpha, and the steps of --tokens and
        --eval-tokens. Raises `UserError` if the settings do not fit the number of ranks.
        """
        model_ranks = self.pp * self.dp_shard * self.cp * self.tp
        dp_replicate = self.dp_replicate or max(1, ranks // model_ranks)
        settings = replace(self, dp_replicate=dp_replicate, accumulate=self.accumulate or self.pp)
        if self.lora_rank and self.lora_alpha is None:
            settings = replace(settings, lora_alpha=2.0 * self.lora_rank)
        if self.tokens:
            settings = replace(settings, steps=math.ceil(self.tokens / self.tokens_per_step))
        if self.eval_tokens:
            eval_every = max(1, round(self.eval_tokens / self.tokens_per_step))
            settings = replace(settings, eval_every=eval_every)
        check_mesh(settings, ranks)
        check_pipeline(settings)
        return settings


def saved_config(run: dict) -> GPTConfig:
    """The model of a run. A flag that is newer than the run has its default.

    run: settings by name, and vocab_size. Raises KeyError if they are of another script.
    """
    shape = {name: run[name] for name in SHAPE if name in run}
    return Settings(**shape).model(run["vocab_size"], run.get("token_count"))


def check_mesh(settings: Settings, ranks: int) -> None:
    """Raises `UserError`, with the flag to change, if the settings do not fit the mesh."""
    if math.prod(settings.mesh_shape()) != ranks:
        sizes = zip(AXES, settings.mesh_shape(), strict=True)
        product = " x ".join(f"--{axis.replace('_', '-')} {size}" for axis, size in sizes)
        raise UserError(f"{product} do not multiply to the {ranks} rank(s) of this job")
    parts = settings.dp_replicate * settings.dp_shard * settings.accumulate
    tokens = "--tp" if settings.cp == 1 else "two chunks per --cp rank, sharded by --tp"
    for flag, value, divisor, reason in (
        ("--batch-size", settings.batch_size, parts, "data-parallel ranks x --accumulate"),
        ("--dim", settings.dim if settings.head_dim is None else 0, settings.heads, "--heads"),
        ("--heads", settings.heads, settings.tp, "--tp"),
        ("--heads", settings.heads, settings.kv_heads or 1, "--kv-heads"),
        ("--mlp-dim", settings.mlp_dim or 4 * settings.dim, settings.tp, "--tp"),
        ("--block-size", settings.block_size, settings.length_multiple, tokens),
    ):
        if value % divisor:
            raise UserError(f"{flag} {value} does not divide by {divisor} ({reason})")
    kv_heads = settings.kv_heads or settings.heads
    if kv_heads % settings.tp and settings.tp % kv_heads:
        raise UserError(
            f"--kv-heads {kv_heads} does not fit --tp {settings.tp}: one must divide the other, so "
            "that each rank has whole heads, or shares one with equally many"
        )
    head_dim = settings.head_dim or settings.dim // settings.heads
    if settings.qkv_bias and settings.architecture != "llama":
        raise UserError("--qkv-bias needs --architecture llama: a GPT-2 has biases of its own")
    has_rope_flags = settings.rope_theta != Settings.rope_theta or settings.rope_scaling
    if has_rope_flags and settings.architecture != "llama":
        raise UserError("--rope-theta and --rope-scaling need --architecture llama")
    if settings.architecture == "llama" and head_dim % 2:
        raise UserError(f"--head-dim {head_dim} is odd: rotary positions turn pairs of numbers")
    if settings.cp > 1 and settings.window and settings.window < settings.block_size:
        raise UserError("--cp does not work with --window: the ring has only the causal mask")
    if settings.cp > 1 and settings.activation_checkpointing == "selective":
        raise UserError(
            "--activation-checkpointing selective does not work with --cp: it would keep all "
            "scores of the ring; leave out selective"
        )
    every = settings.activation_checkpointing
    if isinstance(every, int) and every > settings.layers:
        raise UserError(
            f"--activation-checkpointing {every} recomputes none of the "
            f"{settings.layers} blocks: give N up to --layers"
        )
    if settings.cp > 1 and settings.document_masks:
        raise UserError("--cp does not work with --document-masks: the ring has no document masks")
    if settings.cp > 1 and settings.flex_attention:
        raise UserError("--cp does not work with --flex-attention, which would replace the ring")
    if settings.flex_attention:
        check_flex_attention(settings, head_dim)
    if settings.cp == 1 and settings.cp_kernel != "ring":
        raise UserError(f"--cp-kernel {settings.cp_kernel} needs --cp")
    if settings.loss_chunks > 1 and settings.tp > 1 and not settings.loss_parallel:
        raise UserError("--loss-chunks with --tp needs --loss-parallel, which gathers no logits")
    if settings.tp == 1 and (settings.sequence_parallel or settings.loss_parallel):
        raise UserError("--sequence-parallel and --loss-parallel need --tp")


def check_flex_attention(settings: Settings, head_dim: int) -> None:
    """Raises `UserError`, with the flag to change, if no kernel or no mask is there."""
    if not (settings.document_masks or settings.window):
        raise UserError("--flex-attention needs --document-masks or --window")
    if settings.block_size % 128 or head_dim < 16:
        raise UserError(
            "--flex-attention needs a --block-size that 128 divides, and heads of at least 16 "
            f"numbers: here {settings.block_size}, and {head_dim}"
        )
    for flag, value in (("activation_checkpointing", "selective"), ("schedule", "zero-bubble")):
        if getattr(settings, flag) == value:
            flag = flag.replace("_", "-")
            raise UserError(f"--flex-attention does not work with --{flag} {value}")


def check_pipeline(settings: Settings) -> None:
    """Raises `UserError`, with the flag to change, if the settings make no pipeline."""
    pp, schedule, microbatches = settings.pp, settings.schedule, settings.accumulate
    stages = pp * settings.local_stages
    if (settings.local_stages == 1) != (schedule == "1f1b"):
        raise UserError(
            f"--schedule {schedule} and --stages-per-rank {settings.local_stages} do not fit: "
            "1f1b has one stage per rank, interleaved and zero-bubble have several"
        )
    if pp == 1 and schedule != "1f1b":
        raise UserError(f"--schedule {schedule} needs --pp")
    recomputes = settings.activation_checkpointing or settings.loss_chunks > 1
    if schedule == "zero-bubble" and (recomputes or settings.compile):
        raise UserError(
            "--schedule zero-bubble takes no --activation-checkpointing, --loss-chunks or "
            "--compile: torch cannot split their backward in two: take --schedule interleaved"
        )
    if microbatches < pp:
        raise UserError(
            f"--accumulate {microbatches} micro-batches do not fill --pp {pp} "
            "stages: give at least as many, better four times as many"
        )
    if schedule != "1f1b" and microbatches % (microbatches // pp):
        raise UserError(
            f"--accumulate {microbatches} does not divide into {microbatches // pp} rounds, in "
            f"which --schedule {schedule} takes micro-batches: give a multiple of --pp {pp}"
        )
    if settings.layers < stages:
        raise UserError(
            f"--layers {settings.layers} are too few for --pp {pp} with {stages} stages"
        )
