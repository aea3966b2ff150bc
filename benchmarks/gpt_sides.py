"""Training loops that the benchmarks of the GPT compare: each returns tokens per second."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "transformer_basics")]

import torch
import torch.distributed as dist
from benchmark import MeshRun, config_of
from flops import wait
from hugging_face import their_config
from model import GPT, cross_entropy, initialize
from runtime import Worker
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 4  # per sample


def template(mesh: str, size: str, worker: Worker, batch: int, **more) -> Callable[[], float]:
    """train.py's own step on this mesh."""
    usual = {"size": size, "precision": "fp32", "fp8": False, "batch_size": batch}
    usual |= {"keep_gathered": True, "sequence_parallel": False, "clip": 1.0}
    usual |= {"activation_checkpointing": None, "compile": False}
    run = MeshRun(mesh, SimpleNamespace(**usual | more), worker)
    return lambda: run.tokens_per_second(STEPS)


def bare(
    size: str,
    worker: Worker,
    batch: int,
    wrap=lambda model: model,
    loss=cross_entropy,
    clip: bool = True,
) -> Callable[[], float]:
    """The plainest loop, with the model that `wrap` returns; `batch` sequences per rank."""
    config = config_of(size)
    model = wrap(initialize(GPT(config), 0).to(worker.device))
    return loop(model, lambda x, y: loss(model(x), y), config, worker, batch, clip)


def hugging_face(size: str, worker: Worker, batch: int) -> Callable[[], float]:
    """transformers' model of these sizes in the plainest loop."""
    from transformers import AutoModelForCausalLM

    config = config_of(size)
    model = AutoModelForCausalLM.from_config(their_config(config, end=0)).to(worker.device)
    return loop(model, lambda x, y: cross_entropy(model(x).logits, y), config, worker, batch)


def loop(model: nn.Module, loss_of, config, worker: Worker, batch: int, clip: bool = True):
    # DTensors get their own group: a fused call takes tensors of one kind.
    groups = [
        {"params": [p for p in model.parameters() if isinstance(p, DTensor) == kind]}
        for kind in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.block_size + 1), generator=generator)
    x, y = tokens[:, :-1].to(worker.device), tokens[:, 1:].to(worker.device)

    def tokens_per_second() -> float:
        started = wait(worker.device)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(x, y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        wait(worker.device)
        return STEPS * x.numel() / (time.perf_counter() - started)

    return tokens_per_second


def alone(side: Callable[[], float], worker: Worker, threads: int = 1) -> Callable[[], float]:
    """Rank 0 works, the other ranks wait."""

    def run() -> float:
        torch.set_num_threads(threads)
        rate = side() if worker.is_main else 0.0
        torch.set_num_threads(1)
        dist.barrier()
        return rate

    return run


def together(side: Callable[[], float], worker: Worker, copies: int = 1) -> Callable[[], float]:
    """All ranks work, from a common start to the end of the last one, on `copies` batches."""

    def run() -> float:
        dist.barrier()
        rate = torch.tensor(side() * copies, device=worker.device)  # NCCL adds on GPUs only
        dist.all_reduce(rate, op=dist.ReduceOp.MIN)
        return rate.item()

    return run
