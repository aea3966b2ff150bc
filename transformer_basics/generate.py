"""Write text with a GPT that train.py has saved, on any mesh, also another than it was trained on.

    python transformer_basics/train.py --steps 100 --output-dir runs/gpt
    python transformer_basics/generate.py runs/gpt --prompt "class "                 # one process
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --tp 2
    torchrun --standalone --nproc_per_node=2 transformer_basics/generate.py runs/gpt --pp 2

Look at the text: all three commands write the same text.
"""

import math
from pathlib import Path

import torch
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least, between
from checkpoint import load_model
from config import PROMPT, SHAPE, Settings, saved_config
from model import GPT, GPTConfig
from parallelize import spread_model
from runtime import Worker, distributed_worker
from sampling import generate
from tokenizing import load_tokenizer
from torch.distributed.elastic.multiprocessing.errors import record


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        write(args, worker)


def write(args, worker: Worker) -> None:
    """Load the model in `args.run`, shard it over this job's mesh, and print its text on rank 0."""
    made = []

    def make(run: dict) -> GPT:
        config = saved_config(run)
        settings = settings_of(config, run, args, worker)
        mesh, model, pipeline = spread_model(config, settings, worker.device)
        made.append((pipeline, settings.length_multiple, mesh["cp"]))
        return model  # the weights are about to be loaded

    model, run = load_model(args.run / "checkpoints", make, worker)
    model.eval()
    tokenizer = load_tokenizer(run["tokenizer"])
    prompt = torch.tensor([tokenizer.of_prompt(args.prompt)], device=worker.device)
    [(pipeline, length_multiple, cp)] = made
    options = (args.tokens, args.temperature, args.top_k, args.seed, length_multiple)
    tokens = generate(model, pipeline, prompt, *options, cp=cp)
    if worker.is_main:
        print(tokenizer.decode(tokens[0].tolist()[len(tokenizer.begins) :]))


def settings_of(config: GPTConfig, run: dict, args, worker: Worker) -> Settings:
    """Settings for this job's mesh. Raises `UserError` if ranks or model do not fit the mesh."""
    return Settings(
        **{name: getattr(config, name) for name in SHAPE},
        batch_size=worker.world_size * args.pp,  # not used, but checked: this one always divides
        pp=args.pp,
        dp_shard=args.dp_shard,
        cp=args.cp,
        tp=args.tp,
        lora_rank=run.get("lora_rank"),
        lora_alpha=run.get("lora_alpha"),
    ).on(worker.world_size)


def parse_args():
    parser = ArgumentParser(description="Write text with a trained GPT.")
    add = parser.add_argument
    add("run", type=Path, help="--output-dir of train.py")
    add("--prompt", default=PROMPT, help="text to continue")
    add("--tokens", type=at_least(0), default=300, help="tokens to generate")
    temperature = "divide logits by it (0: take the likeliest token)"
    add("--temperature", type=between(0, math.inf), default=0.8, help=temperature)
    add("--top-k", type=at_least(0), default=40, help="draw from the K likeliest tokens (0: all)")
    add("--seed", type=at_least(0), default=0, help="seed of the tokens that are drawn")
    add("--pp", type=at_least(1), default=1, help="pipeline stages")
    add("--dp-shard", type=at_least(1), default=1, help="FSDP shards")
    add("--cp", type=at_least(1), default=1, help="context-parallel shards of each sequence")
    add("--tp", type=at_least(1), default=1, help="tensor-parallel shards of each layer")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt is empty: the model continues at least one character")
    return args


if __name__ == "__main__":
    main()
