"""Measure how fast a Llama trains, also on long sequences, and how long its start takes.

    python benchmarks/llama.py               # about ten minutes; writes results/llama.md
    python benchmarks/llama.py --repeats 1 --parts training --no-write      # a quick look

training: one process, one thread: train.py's step, plain code, transformers' Llama; and MFU
context: two ranks that share a sequence of 8,192 tokens against one process with two threads
start: initialize Llama 3.1 8B's shard of one of 8 ranks; read weights in Hugging Face's format
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "transformer_basics"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmark import SIZES, config_of
from config import AXES, Settings
from flops import matmul_peak
from gpt_sides import alone, bare, hugging_face, loop, template
from hugging_face import their_config
from model import GPT, GPTConfig, cross_entropy, initialize
from parallelize import materialize, shard_model
from presets import PRESETS
from pretrained import copy_weights, read_weights
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

# Importing it makes the backend "fake" known: there is no public way.
from torch.testing._internal.distributed import fake_pg  # noqa: F401

SIZES["llama 8k"] = (replace(config_of("llama"), layers=2, block_size=8192), 1)


def main() -> None:
    texts = {"training": training_text, "context": context_text, "start": start_text}
    bench.main(
        "llama", "How fast a Llama trains, and how long it takes to begin", __doc__, texts, part
    )


def part(name: str, repeats: int) -> None:
    if name == "start":
        bench.say(start(repeats))
        return
    with distributed_worker("cpu") as worker:
        samples = {"training": training, "context": context}[name](worker, repeats)
        if worker.is_main:
            bench.say(samples)


# ---- training, one process


class PlainBlock(nn.Module):
    """A layer of Llama as a tutorial writes it: no options, no masks, nothing that is sharded."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.norm, self.mlp_norm = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.qkv = nn.Linear(c.dim, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)
        self.gate_up = nn.Linear(c.dim, 2 * c.mlp_dim, bias=False)
        self.down = nn.Linear(c.mlp_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (y * cos + torch.cat([-b, a], -1) * sin for y in (q, k) for a, b in [y.chunk(2, -1)])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PlainLlama(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList([PlainBlock(c) for _ in range(c.layers)])
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        frequencies = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.block_size), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def training(worker: Worker, repeats: int) -> dict:
    config, batch = SIZES["llama"]
    plain = PlainLlama(config)
    count = sum(p.numel() for p in GPT(config).parameters())
    assert sum(p.numel() for p in plain.parameters()) == count
    sides = {
        "train.py's step": template("dp_shard=1", "llama", worker, batch),
        "bare loop": bare("llama", worker, batch),
        "plain code": loop(plain, lambda x, y: cross_entropy(plain(x), y), config, worker, batch),
        "transformers": hugging_face("llama", worker, batch),
        "fp32 peak": lambda: matmul_peak(worker.device, torch.float32),
    }
    return bench.alternate(repeats, sides)


def training_text(repeats: int) -> list[str]:
    samples = bench.measure(sys.executable, __file__, "--repeats", repeats, "--part", "training")
    config, batch = SIZES["llama"]
    ours, *others = names = list(samples)[:-1]
    rows = [(f"10 M parameters, {batch} sequences of {config.block_size} tokens", "tokens/s")]
    rows += [(name, bench.summary(samples[name])) for name in names]
    for name in others:
        ratio = bench.ratio_of_pairs(samples[ours], samples[name])
        rows.append((f"train.py / {name}", bench.summary(ratio)))
    flops = config.flops_per_token(config.block_size)
    shares = [r * flops / p for r, p in zip(samples[ours], samples["fp32 peak"], strict=True)]
    rows.append(("MFU of train.py's step", bench.summary(shares)))
    return ["## One process, one thread", bench.table(rows)]


# ---- a long sequence


def context(worker: Worker, repeats: int) -> dict:
    one, two = "one process, two threads", "train.py --cp 2"
    sides = {
        one: alone(bare("llama 8k", worker, 1), worker, threads=2),
        two: template("cp=2", "llama 8k", worker, 1),
    }
    return bench.alternate(repeats, sides)


def context_text(repeats: int) -> list[str]:
    samples = bench.measure_part(Path(__file__), "context", 2, repeats)
    one, two = samples
    rows = [("2 layers, one sequence of 8,192 tokens", "tokens/s")]
    rows += [(name, bench.summary(samples[name])) for name in samples]
    ratio = bench.ratio_of_pairs(samples[two], samples[one])
    rows.append((f"{two} / {one.split(',')[0]}", bench.summary(ratio)))
    return ["## Two ranks share a sequence", bench.table(rows)]


# ---- the beginning of a run

RANKS = 8  # share Llama 3.1 8B: this process is one of them, the others do nothing
BIG, SMALL = "llama-3.1-8b", "smollm2-135m"


def start(repeats: int) -> dict:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        sides = {"initialize": initialize_shard, "read": partial(read, save(Path(folder)))}
        samples = bench.alternate(repeats, sides)
    dist.destroy_process_group()
    return samples


def shard() -> GPT:
    """Rank 0's eighth of the model, without memory."""
    settings = Settings(**PRESETS[BIG], batch_size=RANKS, dp_shard=RANKS).on(RANKS)
    mesh = init_device_mesh("cpu", settings.mesh_shape(), mesh_dim_names=AXES)
    return shard_model(config_of(BIG), settings, mesh, stage=0)


def initialize_shard() -> float:
    """Seconds until every parameter has its first value, the memory for them included."""
    model, started = shard(), time.perf_counter()
    materialize(model, torch.device("cpu"))
    initialize(model, seed=0)
    return time.perf_counter() - started


def save(folder: Path) -> Path:
    """A model in Hugging Face's format, float32, with random weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(their_config(config_of(SMALL), end=0))
    model.save_pretrained(folder)
    return folder


def read(folder: Path) -> float:
    """Seconds to copy the weights into our model; the file is in the page cache."""
    config = config_of(SMALL)
    model, settings = GPT(config), Settings(**PRESETS[SMALL], init_from=str(folder))
    started = time.perf_counter()
    copy_weights(model, read_weights(settings, config))
    return time.perf_counter() - started


def start_text(repeats: int) -> list[str]:
    samples = bench.measure(sys.executable, __file__, "--repeats", repeats, "--part", "start")
    titles = {
        "initialize": f"initialize {BIG}: the shard of one of {RANKS} ranks",
        "read": f"read {SMALL}, float32, from a file in the page cache",
    }
    rows = [("one process, one thread", "seconds")]
    rows += [(title, bench.summary(samples[name])) for name, title in titles.items()]
    return ["## The beginning of a run", bench.table(rows)]


if __name__ == "__main__":
    main()
