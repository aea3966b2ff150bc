"""Fine-tune a T5 with its parameters sharded over the ranks: the idea and nothing else.

torchrun --standalone --nproc_per_node=2 t5_finetuning/minimal.py                     # a new one
torchrun --standalone --nproc_per_node=2 t5_finetuning/minimal.py --model google-t5/t5-small
"""

import argparse
import gc
import inspect
import os
import shutil
import textwrap

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer, ByT5Tokenizer, T5Config, T5ForConditionalGeneration

FUNCTIONS = (shutil.copy, shutil.move, shutil.which, textwrap.fill, textwrap.wrap, textwrap.indent)
SIZE = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4, "num_layers": 2}


def main(model_id: str | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first values on all ranks: each will keep its part of them
    if model_id:
        tokenizer = AutoTokenizer.from_pretrained(model_id)
        model = T5ForConditionalGeneration.from_pretrained(model_id)
    else:
        tokenizer = ByT5Tokenizer()  # its tokens are bytes: there is no vocabulary to download
        config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **SIZE)
        model = T5ForConditionalGeneration(config)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # eval(): no dropout
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block)  # its parameters are gathered while it computes
    # The root takes what is left, also the one matrix that is both embeddings and the output. Never
    # shard one of its places, fully_shard(model.lm_head): the others would be left with the old one.
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # of the shards

    functions = FUNCTIONS[rank::world_size]  # each rank learns from a part of the batch
    texts = [f"{function.__name__}{inspect.signature(function)}" for function in functions]
    summaries = [inspect.getdoc(function).split("\n")[0] for function in functions]
    source = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    target = tokenizer(summaries, padding=True, return_tensors="pt").to(model.device)
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)  # padding has no loss
    own_tokens = target.attention_mask.sum()
    all_tokens = own_tokens.clone()
    dist.all_reduce(all_tokens)  # a mean of the ranks' means would be wrong: they differ in tokens
    for step in range(20):
        loss = model(**source, labels=labels).loss * own_tokens / all_tokens
        (loss * world_size).backward()  # FSDP averages the ranks' gradients: their sum is wanted
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}   loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="id on the Hugging Face hub; default: a small new T5")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # Gloo, and NCCL for what is on GPUs
    main(arguments.model)  # a function: the model is gone before the group is
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
