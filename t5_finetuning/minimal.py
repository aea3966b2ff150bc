"""Fine-tune a T5 with its parameters sharded over the ranks: the idea and nothing else.

    python t5_finetuning/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=2 t5_finetuning/minimal.py    # two: the same losses
"""  # fmt: skip

import gc
import os
from inspect import getdoc, signature
from shutil import copy, copyfile, which
from textwrap import fill, indent, wrap

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

SMALL = dict(d_model=64, d_kv=16, d_ff=256, num_heads=4, num_layers=2, decoder_start_token_id=0)


def train(device: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()  # who am I, of how many?
    mesh = init_device_mesh(device, (world_size,))  # all ranks, in a line
    torch.manual_seed(0)  # the same first values on all ranks: each will keep its part of them
    tokenizer = ByT5Tokenizer()  # its tokens are bytes: there is no vocabulary to download
    # Or from the hub: .from_pretrained("google-t5/t5-small"), the model and AutoTokenizer.
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **SMALL))
    model.to(device).eval()  # eval(): no dropout
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, mesh=mesh)  # its parameters are gathered while it computes
    # The root gets the rest, also the one matrix that is both embeddings and the output. The trap:
    # a unit around one of its places, as in fully_shard(model.lm_head), would tear them apart.
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # of the shards

    functions = (copy, copyfile, which, fill, indent, wrap)[rank::world_size]  # this rank's part
    texts = [f"{function.__name__}{signature(function)}" for function in functions]
    summaries = [getdoc(function).splitlines()[0] for function in functions]
    source = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    target = tokenizer(summaries, padding=True, return_tensors="pt").to(model.device)
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)  # padding has no loss
    own_tokens = target.attention_mask.sum()
    all_tokens = own_tokens.clone()
    dist.all_reduce(all_tokens)  # a mean of the ranks' means would be wrong: they differ in tokens
    for step in range(10):
        loss = model(**source, labels=labels).loss * own_tokens / all_tokens
        (loss * world_size).backward()  # FSDP averages the ranks' gradients: their sum is wanted
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:  # one rank prints
            print(f"step {step}   loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    use_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each one
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    train("cuda" if use_cuda else "cpu")
    gc.collect()  # a model is full of cycles; gone with it is all that still uses the group
    dist.barrier()  # nobody leaves while another rank still waits for a message
    dist.destroy_process_group()
