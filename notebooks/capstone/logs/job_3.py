"""Job 3, on three ranks. Its log is job_3.txt."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        counts = torch.stack([(net(x).argmax(dim=1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(120, 4), torch.randint(0, 3, (120,))
    x, y = x[rank::world_size], y[rank::world_size]
    net = nn.Linear(4, 3)
    ddp_net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        for at in range(0, 30, 10):
            loss = F.cross_entropy(ddp_net(x[at : at + 10]), y[at : at + 10])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss:.3f}", flush=True)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy(net, x[30:], y[30:]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
