"""Job 2, on three ranks, started twice. The log of both starts is job_2.txt."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    file = Path(sys.argv[1], "checkpoint.pt")
    torch.manual_seed(0)
    x, y = torch.randn(90, 4), torch.randint(0, 3, (90,))
    x, y = x[rank::world_size], y[rank::world_size]
    net = nn.Linear(4, 3)
    ddp_net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = torch.tensor(0)
    if rank == 0 and file.exists():
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    dist.broadcast(step, src=0)
    last = step + 20
    while step < last:
        if step % 10 == 0:
            size = sum(p.square().sum() for p in net.parameters()).sqrt()
            print(f"rank {rank}, step {step}: |weights| {size:.4f}", flush=True)
        loss = F.cross_entropy(ddp_net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    size = sum(p.square().sum() for p in net.parameters()).sqrt()
    print(f"rank {rank}, step {step}: |weights| {size:.4f}, mean loss {loss:.4f}", flush=True)
    if rank == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
