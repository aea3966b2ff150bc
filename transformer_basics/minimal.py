"""Tensor parallelism inside FSDP in one screen: a transformer on a mesh of dp x tp ranks.

    python transformer_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=4 transformer_basics/minimal.py    # 2 x 2

Look at the loss: it is the same on any number of ranks.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, LENGTH, BATCH, STEPS = 64, 16, 128, 50  # BATCH: sequences, over all ranks


def train(device: str) -> None:
    tp = min(2, dist.get_world_size())  # neighbours in rank, so of one node: they talk most
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # on all ranks the same model and, below, the same global batches
    options = {"dropout": 0.0, "activation": "gelu", "bias": False, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, **options) for _ in range(2)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * DIM, 256))
    model = nn.Sequential(nn.Embedding(256, DIM), *blocks, head).to(device)
    # tp: some outputs of one layer, the matching inputs of the next, then a sum over the ranks.
    plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    for block in blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])  # dp: what is left is cut again, gathered when it is
    fully_shard(model, mesh=mesh["dp"])  # needed, and its gradients are averaged
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # on two meshes
    with open(os.__file__, "rb") as file:
        text = torch.tensor(list(file.read()))  # a byte is a token
    for step in range(1, STEPS + 1):  # A tp group shares a batch: it is chosen by the dp rank.
        starts = torch.randint(len(text) - LENGTH, (dp, BATCH // dp))[mesh["dp"].get_local_rank()]
        tokens = text[starts[:, None] + torch.arange(LENGTH + 1)].to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])  # the next byte
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)  # only to print it
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}   loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    use_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each one
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    train("cuda" if use_cuda else "cpu")  # a function: at its end the model is gone
    dist.barrier()  # nobody leaves while another process still waits for a message
    dist.destroy_process_group()
