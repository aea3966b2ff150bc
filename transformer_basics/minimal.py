"""Tensor parallelism inside FSDP in one screen: a GPT on a mesh of dp x tp ranks.

    python transformer_basics/minimal.py                                      # one process
    torchrun --standalone --nproc_per_node=4 transformer_basics/minimal.py    # 2 x 2
Look at the loss: it is the same on any number of ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, HEADS, LENGTH, BATCH, STEPS = 64, 4, 32, 64, 50  # BATCH: sequences, over all ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.position, self.norm = nn.Parameter(torch.zeros(LENGTH, DIM)), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        up, down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), up, nn.GELU(), down)

    def forward(self, x):
        y, layers = self.norm(x + self.position), (self.query, self.key, self.value)
        # -1: this rank's heads, as many as its shards of the layers have
        q, k, v = (f(y).unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for f in layers)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def train(device: torch.device, rank: int, world_size: int) -> None:
    tp = min(2, world_size)  # neighbour ranks, so on one node: tensor parallelism sends most
    dp = world_size // tp
    if dp * tp != world_size or BATCH % dp:
        raise SystemExit(f"error: {BATCH} sequences do not divide over {world_size} ranks in pairs")
    mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same model and, below, the same global batches on all ranks
    ends = nn.Embedding(256, DIM), nn.Linear(DIM, 256)
    model = nn.Sequential(ends[0], Block(), Block(), nn.LayerNorm(DIM), ends[1]).to(device)
    # tp: each rank has half of the heads, and of the MLP's features; then comes a sum over ranks.
    plan = dict.fromkeys(("query", "key", "value", "mlp.1"), ColwiseParallel())
    plan |= {"out": RowwiseParallel(), "mlp.3": RowwiseParallel()}
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])  # dp: shard the tp shards; gather them when needed
    fully_shard(model, mesh=mesh["dp"])  # all other parameters; backward averages the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # on two meshes
    text = torch.from_file(os.__file__, size=30_000, dtype=torch.uint8).long()  # bytes: tokens
    for step in range(1, STEPS + 1):  # The dp rank chooses the batch: a tp group shares it.
        starts = torch.randint(len(text) - LENGTH, (dp, BATCH // dp))[mesh["dp"].get_local_rank()]
        tokens = text[starts[:, None] + torch.arange(LENGTH + 1)].to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])  # next token
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)  # only to print it
        if rank == 0 and step % 10 == 0:
            print(f"step {step}   loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:  # torchrun sets these; plain python is a job of one process
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device, local_rank = torch.device("cpu"), int(os.environ.get("LOCAL_RANK", 0))
    count = 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()
    if count >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # a GPU for each rank of this machine
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)  # this rank's own
    dist.init_process_group(dist.get_default_backend_for_device(device))  # gloo, nccl, ...
    rank, world_size = dist.get_rank(), dist.get_world_size()  # who am I, of how many?
    if rank == 0:  # one rank prints
        print(f"{world_size} rank(s) on {device.type}, {dist.get_backend()}", flush=True)
    train(device, rank, world_size)  # a function: the model must end before the group
    dist.barrier()  # no rank leaves while another one still waits for a message
    dist.destroy_process_group()
