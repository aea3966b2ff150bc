"""A transformer on a two-dimensional mesh: tensor parallelism inside FSDP, and nothing else.

    torchrun --standalone --nproc_per_node=1 transformer_basics/minimal.py
    torchrun --standalone --nproc_per_node=4 transformer_basics/minimal.py       # dp 2 x tp 2

Look at the loss: any number of ranks prints the same. train.py is what this grows into.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, HEAD_DIM, LENGTH, BATCH, STEPS = 64, 16, 64, 8, 50  # BATCH: sequences, over all ranks


def main() -> None:
    # One GPU for each rank of this node, or all on the CPU.
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # Neighbours in rank form a tp group, so that it lies within a node: they wait for each other
    # twice in every layer. The ranks of a dp group talk once a layer, and may be far apart.
    tp = min(2, dist.get_world_size())
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # all ranks build the same model; the next lines leave each its part
    embedding, blocks = nn.Embedding(256, DIM), nn.Sequential(Block(), Block())
    head = nn.Linear(DIM, 256, bias=False)
    model = nn.Sequential(embedding, blocks, head, nn.LogSoftmax(-1)).to(device)
    # Tensor parallelism: a rank computes some of a layer's features (columns), and the next layer
    # takes just these (rows), so that each pair of layers needs a single sum over the ranks.
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),  # some of the table's rows
        "1.*.qkv": ColwiseParallel(),  # some of the heads
        "1.*.out": RowwiseParallel(),
        "1.*.expand": ColwiseParallel(),
        "1.*.contract": RowwiseParallel(),
        "2": ColwiseParallel(output_layouts=Replicate()),  # the loss needs all logits
    }
    parallelize_module(model, mesh["tp"], plan)
    # FSDP: what a rank has by now is cut once more, over dp. Each unit is gathered when it is
    # needed, and afterwards its gradients are averaged, because dp ranks read different sequences.
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of the shards: so not earlier

    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # a byte is a token
    generator = torch.Generator().manual_seed(1)  # the same on all ranks: all draw the whole batch
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        starts = starts[mesh["dp"].get_local_rank() :: dp]  # not by rank: a tp group shares a batch
        batch = text[starts[:, None] + torch.arange(LENGTH + 1)].to(device)
        loss = F.nll_loss(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)  # of all sequences, to print it
            if dist.get_rank() == 0:
                print(f"step {step}   loss {loss.item():.4f}")


class Block(nn.Module):
    """Knows no positions: a causal transformer can do without (arXiv 2305.19466)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.expand, self.contract = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        qkv = self.qkv(F.rms_norm(x, (DIM,)))  # -1: as many heads as tensor parallelism left here
        q, k, v = qkv.unflatten(-1, (-1, 3 * HEAD_DIM)).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(F.rms_norm(x, (DIM,)))))


if __name__ == "__main__":
    main()  # in a function, so that the model is gone before the groups that it uses
    dist.barrier()  # nobody closes a connection that another rank still reads from
    dist.destroy_process_group()
