"""DistributedDataParallel written by hand: the idea, then what makes it fast.

    python ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/ddp_from_scratch.py --optimizer sgd

`NaiveDDP` is the idea: after backward, average each gradient over the ranks. `BucketedDDP` sends
few large messages instead of many small ones, while backward still computes.

The script trains with both, with torch's DDP and in one process (compare_ddp.py). Look at the
differences, the number of collectives, and the timeline: the all_reduce of the first bucket starts
long before backward ends. (On GPUs torch 2.15's own DDP does not overlap: see README.md.)
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from compare_ddp import compare, parse_args
from runtime import distributed_worker
from torch import nn
from torch.autograd import Variable
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args("DDP by hand, next to torch's DDP and to one process.")
    versions = {
        "naive": NaiveDDP,
        "bucketed": lambda module: BucketedDDP(module, args.bucket_cap_mb),
    }
    with distributed_worker(args.device) as worker:
        compare(versions, args, worker)


class NaiveDDP(nn.Module):
    """Averages gradients over all ranks, one blocking all_reduce per parameter, after backward.

    Use it like torch's DistributedDataParallel. Every rank must make the same calls, so a parameter
    that this rank did not use gets a zero gradient, even if no rank used it. Parameters that are
    frozen at construction are left out. The module must be on one device.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.sync = True  # False inside no_sync()
        self.in_backward = False
        # parameters() yields a tied parameter once, and its hook runs once, after all uses.
        self.params = [p for p in module.parameters() if p.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # equal start, equal gradients: equal result
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.on_gradient)  # when param.grad is ready

    def forward(self, *inputs, **kwargs):
        if self.sync and torch.is_grad_enabled():
            for buffer in self.module.buffers():  # running statistics differ: take rank 0's
                dist.broadcast(buffer, src=0)
        if self.in_backward:
            raise RuntimeError("a backward did not end: wrap the module again")
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self):
        """Inside, gradients only add up on each rank; the next backward outside averages them."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    @torch.no_grad()
    def on_gradient(self, param: nn.Parameter) -> None:
        if self.sync and not self.in_backward:
            # How do we learn that backward is over? Counting gradients fails when a parameter is
            # unused. The autograd engine calls back before backward() returns. This method is not
            # public, but torch's own DDP and FSDP rely on it. The public way, a call after
            # backward(), is easily forgotten.
            self.in_backward = True  # one callback is enough
            Variable._execution_engine.queue_callback(self.on_backward_end)

    @torch.no_grad()
    def on_backward_end(self) -> None:
        self.in_backward = False
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            param.grad.mul_(1 / dist.get_world_size())
            dist.all_reduce(param.grad)


class BucketedDDP(NaiveDDP):
    """Averages gradients in buckets, each as soon as backward has filled it.

    bucket_cap_mb: a bucket is closed when it has reached this size (MiB).
    Backward computes the last layer's gradients first, so buckets hold parameters from the last to
    the first. Every rank must start its buckets in this order, or messages would be mixed up. If
    backward does not reach a parameter, its bucket and the later ones start at the end of backward.
    The missing gradient counts as zero; if no rank has one, it stays None.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25):
        super().__init__(module)
        self.buckets = make_buckets(reversed(self.params), cap_bytes=bucket_cap_mb * 2**20)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}
        self.started = 0  # buckets whose all_reduce this backward has started

    @torch.no_grad()
    def on_gradient(self, param: nn.Parameter) -> None:
        super().on_gradient(param)
        if self.sync:
            self.bucket_of[param].add(param)
            while self.started < len(self.buckets) and self.buckets[self.started].is_full():
                self.buckets[self.started].start()
                self.started += 1

    @torch.no_grad()
    def on_backward_end(self) -> None:
        self.in_backward = False
        for bucket in self.buckets[self.started :]:  # from the first incomplete bucket on
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0


def make_buckets(params, cap_bytes: float) -> list["Bucket"]:
    """Partition the parameters, in their order, into buckets of one dtype each."""
    groups = []
    for param in params:
        group = groups[-1] if groups else []
        is_full = sum(p.nbytes for p in group) >= cap_bytes
        if not group or is_full or param.dtype != group[0].dtype:
            groups.append([param])
        else:
            group.append(param)
    return [Bucket(group) for group in groups]


class Bucket:
    """A flat buffer with the gradients of some parameters, and one flag per parameter.

    The flag is 1 if this rank has a gradient. all_reduce sums it too: 0 means that no rank has one.
    """

    def __init__(self, params: list[nn.Parameter]):
        sizes = [param.numel() for param in params]
        self.flat = params[0].new_zeros(sum(sizes) + len(params))
        *views, self.used = self.flat.split([*sizes, len(params)])
        self.views = {p: view.view_as(p) for p, view in zip(params, views, strict=True)}
        self.waiting_for = set(params)
        self.work = None  # the Work handle of the all_reduce

    def is_full(self) -> bool:
        return not self.waiting_for

    def add(self, param: nn.Parameter) -> None:
        """Write this parameter's gradient, divided by the number of ranks, to the buffer.

        Division comes first because the sum might overflow in fp16. From here on .grad is a view of
        the buffer: the sum needs no copy back, and memory holds one set of gradients. After
        zero_grad(), which sets .grad to None, autograd makes a new tensor, and this write copies
        it. After zero_grad(set_to_none=False) autograd adds into the view, and this write only
        divides in place.
        """
        torch.mul(param.grad, 1 / dist.get_world_size(), out=self.views[param])
        param.grad = self.views[param]
        self.waiting_for.discard(param)

    def start(self) -> None:
        self.used.fill_(1)
        for i, (param, view) in enumerate(self.views.items()):
            if param in self.waiting_for and param.grad is not None:
                self.add(param)  # from an earlier backward, under no_sync()
            elif param in self.waiting_for:
                view.zero_()
                self.used[i] = 0
        self.work = dist.all_reduce(self.flat, async_op=True)  # returns at once

    def finish(self) -> None:
        self.work.wait()
        if self.waiting_for:  # only then: reading a number from a GPU waits for it
            for (param, view), used in zip(self.views.items(), self.used.tolist(), strict=True):
                if used and param.grad is None:
                    param.grad = view  # another rank had a gradient
        self.waiting_for = set(self.views)
        self.work = None


if __name__ == "__main__":
    main()
