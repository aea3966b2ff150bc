"""Tensor parallelism inside FSDP in one screen: a Llama on a mesh of dp x tp ranks.

    python transformer_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=4 transformer_basics/minimal.py    # 2 x 2
Look at the loss: it is the same on any number of ranks."""

import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH, STEPS = 32, 64, 50  # BATCH: sequences per step, over all ranks
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES)  # new weights: no download


def train(device: torch.device, rank: int, world_size: int) -> None:
    tp = min(2, world_size)  # neighbour ranks, so on one node: tensor parallelism sends most
    dp = world_size // tp
    if dp * tp != world_size or BATCH % dp:
        raise SystemExit(f"error: {BATCH} sequences do not divide over {world_size} ranks in pairs")
    mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same model and, below, the same global batches on all ranks
    model = LlamaForCausalLM(CONFIG).to(device)
    # tp: each rank has half of the heads and of the MLP's features; o_proj and down_proj add up.
    columns = ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = dict.fromkeys(columns, ColwiseParallel())
    plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for block in model.model.layers:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])  # dp: shard the tp shards; gather them when needed
    fully_shard(model, mesh=mesh["dp"])  # all other parameters; backward averages the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # on two meshes
    text = torch.from_file(os.__file__, size=30_000, dtype=torch.uint8).long()  # bytes: tokens
    for step in range(1, STEPS + 1):  # The dp rank chooses the batch: a tp group shares it.
        starts = torch.randint(len(text) - LENGTH, (dp, BATCH // dp))[mesh["dp"].get_local_rank()]
        tokens = text[starts[:, None] + torch.arange(LENGTH + 1)].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss  # of each next token
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)  # only to print it
        if rank == 0 and step % 10 == 0:
            print(f"step {step}   loss {loss.item():.4f}", flush=True)


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
