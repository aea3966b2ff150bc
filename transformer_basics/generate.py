"""Write text with a GPT that train.py has saved, on any mesh, whatever mesh it was trained on.

    python transformer_basics/generate.py runs/gpt --prompt "class "                 # one process
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --tp 2
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --pp 2

Look at the text: all three write the same one.
"""

import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from arguments import PROMPT, ArgumentParser, check_mesh
from build import build_model, make_mesh
from checkpoint import load_model
from data import load_tokenizer
from model import GPT, GPTConfig
from runtime import Worker, distributed_worker
from stages import Stages
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

# What build_model() asks for besides, and what is for training only.
UNUSED = dict.fromkeys(("dp_replicate", "accumulate")) | dict.fromkeys(
    ("sequence_parallel", "loss_parallel", "keep_gathered", "activation_checkpointing", "compile"),
    False,
)
UNUSED["batch_size"] = 0


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        write(args, worker)


def write(args, worker: Worker) -> None:
    built = SimpleNamespace()

    def make(run: dict) -> GPT:
        config = GPTConfig(**{field.name: run[field.name] for field in fields(GPTConfig)})
        settings = SimpleNamespace(**run | vars(args) | UNUSED)
        check_mesh(settings, ArgumentParser(), worker.world_size)
        mesh = make_mesh(settings, worker)
        built.model, built.stages = build_model(config, mesh, settings, worker)
        return built.model

    model, run = load_model(args.run / "checkpoint", make)
    model.eval()
    encode, decode, _, _ = load_tokenizer(run["tokenizer"])
    prompt = torch.tensor([encode(args.prompt)], device=worker.device)
    options = (args.tokens, args.temperature, args.top_k, args.seed)
    tokens = generate(model, built.stages, prompt, *options)
    if worker.is_main:
        print(decode(tokens[0].tolist()))


@torch.no_grad()
def generate(
    model: GPT,
    stages: Stages | None,
    tokens_BT: Tensor,
    count: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    multiple: int = 1,
) -> Tensor:
    """Continue each row of `tokens_BT`, int64, by `count` tokens; returns rows of T + count.

    All ranks call this with the same arguments: each step is a forward pass of the whole mesh, and
    all draw the same random numbers. Each token costs a pass over the whole window.
    temperature: below 1 the likely becomes likelier; 0 takes the likeliest (greedy).
    top_k: draw from so many likeliest tokens only; 0: from all.
    multiple: the number of tokens in a pass must be one of this (sequence parallelism).
    """
    generator = torch.Generator(tokens_BT.device).manual_seed(seed)
    for _ in range(count):
        window = tokens_BT[:, -model.config.block_size :]
        length = window.shape[1]
        # Filled up behind the end, where no earlier token looks.
        window = torch.nn.functional.pad(window, (0, -length % multiple))
        logits = stages.forward(window) if stages else model(window)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if logits is None:  # another stage has them
            chosen = tokens_BT.new_empty(len(tokens_BT), 1)
        else:
            chosen = choose(logits[:, length - 1].float(), temperature, top_k, generator)
        if stages:
            chosen = stages.from_last(chosen)
        tokens_BT = torch.cat([tokens_BT, chosen], dim=1)
    return tokens_BT


def choose(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token for each row: (B, 1), int64."""
    if temperature == 0:
        return logits_BV.argmax(1, keepdim=True)
    logits_BV = logits_BV / temperature
    if top_k:
        kth = logits_BV.topk(min(top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth, -torch.inf)
    return torch.multinomial(logits_BV.softmax(1), 1, generator=generator)


def parse_args():
    parser = ArgumentParser(description="Write text with a trained GPT.")
    add = parser.add_argument
    add("run", type=Path, help="--output-dir of train.py")
    add("--prompt", default=PROMPT)
    add("--tokens", type=int, default=300, help="how many to write")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-k", type=int, default=40, help="draw from so many likeliest; 0: from all")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp-shard", type=int, default=1, help="shards (FSDP)")
    add("--tp", type=int, default=1, help="parts of each layer")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    for names, holds, limit in (
        ("pp dp_shard tp", lambda x: x >= 1, "at least 1"),
        ("tokens top_k", lambda x: x >= 0, "at least 0"),
        ("temperature", lambda x: 0 <= x < math.inf, "at least 0"),
    ):
        for name in names.split():
            value, flag = getattr(args, name), "--" + name.replace("_", "-")
            if not holds(value):
                parser.error(f"{flag} must be {limit}, not {value}")
    if not args.prompt:
        parser.error("--prompt is empty: the model continues at least one character")
    return args


if __name__ == "__main__":
    main()
