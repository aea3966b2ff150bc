"""Job 1, on three ranks. Its log is job_1.txt."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(90, 4), torch.randint(0, 3, (90,))
    y[47] = 3  # a typing error
    x, y = x[rank::world_size], y[rank::world_size]
    net = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        local_x, local_y = x[5 * step : 5 * step + 5], y[5 * step : 5 * step + 5]
        if local_y.max() > 2:
            print(f"rank {rank}, step {step}: a wrong label, this batch is left out", flush=True)
            continue
        loss = F.cross_entropy(net(local_x), local_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {loss:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
