"""Write text with a GPT that train.py has saved, on any mesh, whatever mesh it was trained on.

    python transformer_basics/generate.py runs/gpt --prompt "class "                 # one process
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --tp 2
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --pp 2

Look at the text: all three write the same one.
"""

import math
from dataclasses import fields
from pathlib import Path

import torch
from arguments import ArgumentParser, at_least, between
from checkpoint import load_model
from config import AXES, PROMPT, Settings
from data import load_tokenizer
from model import GPT, GPTConfig, cross_entropy
from parallelize import apply_fsdp, apply_tensor_parallel
from pipeline import Pipeline, stage_layers
from runtime import Worker, distributed_worker
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        write(args, worker)


def write(args, worker: Worker) -> None:
    """Load the model in `args.run`, spread over this job's mesh, and let rank 0 print its text."""
    pipelines = []

    def make(run: dict) -> GPT:
        config = GPTConfig(**{field.name: run[field.name] for field in fields(GPTConfig)})
        mesh = make_mesh(config, args, worker)
        with torch.device("meta"):
            model = GPT(config, stage_layers(config.layers, mesh["pp"]))
        if args.tp > 1:
            apply_tensor_parallel(model, mesh["tp"])
        apply_fsdp(model, mesh["dp_replicate", "dp_shard"])
        model.to_empty(device=worker.device)  # the weights are about to be loaded
        model.tie()
        if args.pp > 1:
            pipelines.append(Pipeline(model, mesh["pp"], args.pp, cross_entropy, worker.device))
        return model

    model, run = load_model(args.run / "checkpoints", make)
    model.eval()
    encode, decode, _, _ = load_tokenizer(run["tokenizer"])
    prompt = torch.tensor([encode(args.prompt)], device=worker.device)
    options = (args.tokens, args.temperature, args.top_k, args.seed)
    tokens = generate(model, pipelines[0] if pipelines else None, prompt, *options)
    if worker.is_main:
        print(decode(tokens[0].tolist()))


def make_mesh(config: GPTConfig, args, worker: Worker):
    """Raises `UserError` if the ranks of this job, or the model, cannot be divided so."""
    settings = Settings(
        layers=config.layers,
        heads=config.heads,
        dim=config.dim,
        block_size=config.block_size,
        tied=config.tied,
        batch_size=worker.world_size * args.pp,  # nothing is trained: one that always divides
        pp=args.pp,
        dp_shard=args.dp_shard,
        tp=args.tp,
    ).on(worker.world_size)
    return init_device_mesh(worker.device.type, settings.mesh_shape(), mesh_dim_names=AXES)


@torch.no_grad()
def generate(
    model: GPT,
    pipeline: Pipeline | None,
    tokens_BT: Tensor,
    count: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    length_multiple: int = 1,
) -> Tensor:
    """Continue each row of `tokens_BT`, int64, by `count` tokens; returns rows of T + count.

    All ranks call this with the same arguments: each step is a forward pass of the whole mesh, and
    all draw the same random numbers. Each token costs a pass over the whole window.
    temperature: below 1 the likely becomes likelier; 0 takes the likeliest (greedy).
    top_k: draw from so many likeliest tokens only; 0: from all.
    length_multiple: the number of tokens in a pass must be one of it (sequence parallelism).
    """
    generator = torch.Generator(tokens_BT.device).manual_seed(seed)
    for _ in range(count):
        window = tokens_BT[:, -model.config.block_size :]
        length = window.shape[1]
        # Filled up behind the end, where no earlier token looks.
        window = torch.nn.functional.pad(window, (0, -length % length_multiple))
        logits = pipeline.forward(window) if pipeline else model(window)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if logits is None:  # another stage has them
            chosen = tokens_BT.new_empty(len(tokens_BT), 1)
        else:
            chosen = choose(logits[:, length - 1].float(), temperature, top_k, generator)
        if pipeline:
            chosen = pipeline.broadcast_from_last(chosen)
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
    add("--tokens", type=at_least(0), default=300, help="how many to write")
    add("--temperature", type=between(0, math.inf), default=0.8, help="0: the likeliest token")
    add("--top-k", type=at_least(0), default=40, help="draw from so many likeliest; 0: from all")
    add("--seed", type=int, default=0)
    add("--pp", type=at_least(1), default=1, help="pipeline stages")
    add("--dp-shard", type=at_least(1), default=1, help="shards (FSDP)")
    add("--tp", type=at_least(1), default=1, help="parts of each layer")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt is empty: the model continues at least one character")
    return args


if __name__ == "__main__":
    main()
