"""Fine-tune a T5 with its parameters sharded over the ranks (FSDP), in the fewest lines.

    python t5_finetuning/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 t5_finetuning/minimal.py    # two ranks, equal losses
"""  # fmt: skip

import gc
import os
from inspect import getdoc, signature
from shutil import copy, copyfile, which
from textwrap import fill, indent, wrap

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration


def train(device: torch.device, rank: int, world_size: int) -> None:
    if world_size > 6:
        raise SystemExit(f"error: 6 texts are too few for {world_size} ranks")
    mesh = dist.init_device_mesh(device.type, (world_size,))  # one axis: all ranks
    torch.manual_seed(0)  # the same initial values on all ranks; each rank keeps its shard
    size = dict(d_model=64, d_kv=16, d_ff=256, num_heads=4, num_layers=2, decoder_start_token_id=0)
    tokenizer = ByT5Tokenizer()  # one token per byte, no download
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **size))
    model.to(device).eval()  # eval(): no dropout
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, mesh=mesh)  # a block is gathered while it computes
    fully_shard(model, mesh=mesh)  # the root: all other parameters, with the tied embedding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # on the shards
    functions = (copy, copyfile, which, fill, indent, wrap)[rank::world_size]  # this rank's batch
    texts = [f"{function.__name__}{signature(function)}" for function in functions]
    summaries = [getdoc(function).splitlines()[0] for function in functions]
    source = tokenizer(texts, padding=True, return_tensors="pt").to(device)
    target = tokenizer(summaries, padding=True, return_tensors="pt").to(device)
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)  # padding has no loss
    own_tokens = target.attention_mask.sum()
    all_tokens = own_tokens.clone()
    dist.all_reduce(all_tokens)  # ranks differ in tokens: a mean of their means would be wrong
    for step in range(10):
        loss = model(**source, labels=labels).loss * own_tokens / all_tokens
        optimizer.zero_grad()
        (loss * world_size).backward()  # FSDP averages the ranks' gradients; we need their sum
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}   loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device = torch.device("cpu")
    count = 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()
    if count >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # a GPU for each rank of this machine
        device = torch.device(int(os.environ.get("LOCAL_RANK", 0)))  # this rank's own: cuda:0, ...
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device.index)
    rank, world_size = dist.get_rank(), dist.get_world_size()  # who am I, of how many?
    if rank == 0:  # one rank prints
        print(f"{world_size} rank(s) on {device.type}, {dist.get_backend()}", flush=True)
    train(device, rank, world_size)  # a function: the model must end before the group
    gc.collect()  # a model holds cycles; when it is gone, nothing uses the group any more
    dist.barrier()  # no rank leaves while another one still waits for a message
    dist.destroy_process_group()
