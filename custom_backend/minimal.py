"""The smallest custom backend: all_reduce through the store, and DDP training on top of it.

    torchrun --standalone --nproc_per_node=2 custom_backend/minimal.py

Look at the printed difference: each rank has the gradients of one process with the full batch.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class StoreGroup(dist.ProcessGroup):
    """Sends tensors as values of the store where the ranks met. Slow; enough for DDP in fp32."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store = dist.PrefixStore(f"life {store.add(f'lives of {rank}', 1)}", store)

    def exchange(self, tensor):  # returns the tensors of all ranks
        call = self.store.add(f"calls of {self.rank()}", 1)  # all ranks make the same calls
        self.store.set(f"{call}/{self.rank()}", tensor.detach().numpy().tobytes())
        values = [self.store.get(f"{call}/{r}") for r in range(self.size())]  # get() waits
        self.store.delete_key(f"{call - 1}/{self.rank()}")  # all ranks are in this call by now
        return [torch.frombuffer(bytearray(v), dtype=tensor.dtype) for v in values]

    def allreduce(self, tensors, options):  # DDP calls it from C++, dist.all_reduce from Python
        assert options.reduceOp == dist.ReduceOp.SUM, "store: all_reduce knows SUM only"
        tensors[0].detach().copy_(sum(self.exchange(tensors[0])).view_as(tensors[0]))
        return Done(tensors)

    def barrier(self, opts):
        return Done(self.exchange(torch.zeros(1)))  # all values are here: all ranks have come


class Done(dist.Work):  # the handle of an operation that is already complete
    def __init__(self, tensors):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(tensors)

    def wait(self, *timeout):
        return True

    def get_future(self):
        return self.future


def main() -> None:
    dist.Backend.register_backend("store", StoreGroup, devices=["cpu"])
    dist.init_process_group("store")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, model = torch.randn(6 * world_size, 4), torch.nn.Linear(4, 1)
    (expected,) = torch.autograd.grad(model(inputs).square().mean(), model.weight)  # single process
    ddp_model = DistributedDataParallel(model, init_sync=False)  # the weights are equal already
    ddp_model(inputs[rank::world_size]).square().mean().backward()  # DDP averages through the store
    difference = (model.weight.grad - expected).abs().max().item()
    if rank == 0:
        print(f"{world_size} ranks, {dist.get_backend()}: gradients off by {difference:.1e}")
    dist.barrier()  # no rank leaves while another still reads the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
