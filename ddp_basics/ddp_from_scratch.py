"""DistributedDataParallel written by hand: the idea, then what makes it fast.

    python ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_from_scratch.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/ddp_from_scratch.py --optimizer sgd

`NaiveDDP` is the idea: after backward, average each gradient over the ranks. `BucketedDDP` sends
few large messages instead of many small ones, while backward still computes.

Run, this file trains with both, with torch's DDP and with one process (compare_ddp.py does that).
Look at the differences, the number of collectives, and the timeline: the first bucket leaves long
before backward ends.
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

    Used like torch's DistributedDataParallel. A parameter that this rank did not use counts as a
    zero gradient (and gets one even if no rank used it): every rank must make the same calls.
    Parameters that are frozen when it is built stay out. Not for a module on several devices.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.sync = True  # False inside no_sync()
        self.in_backward = False
        # parameters() names a tied parameter once. Its hook runs once, too: after all uses.
        self.params = [p for p in module.parameters() if p.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # equal starts plus equal gradients: equal ends
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.on_gradient)  # when param.grad is ready

    def forward(self, *inputs, **kwargs):
        if self.sync and torch.is_grad_enabled():
            for buffer in self.module.buffers():  # running statistics differ: rank 0's are kept
                dist.broadcast(buffer, src=0)
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self):
        """Gradients of backward passes in here only add up on each rank, to be averaged later."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    @torch.no_grad()
    def on_gradient(self, param: nn.Parameter) -> None:
        if self.sync and not self.in_backward:
            # How do we learn that backward is over? Counting gradients fails when some parameter is
            # unused. The autograd engine knows, and calls back before backward() returns. Its
            # method is not public, but torch's own DDP and FSDP rely on it; the public way would
            # be a call after backward(), which somebody forgets.
            self.in_backward = True  # one call is enough
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
    Backward computes the last layer's gradients first, so buckets are filled from the last
    parameter to the first. They start in this order on every rank, or messages would be mixed up. A
    bucket with a parameter that this backward does not reach therefore waits for the end, and with
    it those behind. The missing gradient counts as zero; if no rank had one, it stays None.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25):
        super().__init__(module)
        self.buckets = make_buckets(reversed(self.params), cap_bytes=bucket_cap_mb * 2**20)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}
        self.started = 0  # buckets of this backward that are on their way

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
        for bucket in self.buckets[self.started :]:  # those that miss a gradient, and those behind
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0


def make_buckets(params, cap_bytes: float) -> list["Bucket"]:
    """Deal the parameters out, in their order, to buckets of one dtype each."""
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
    """A flat buffer with the gradients of some parameters, and one more number per parameter.

    That number, 1 where this rank has a gradient, is summed like the rest: 0 means that none has.
    """

    def __init__(self, params: list[nn.Parameter]):
        sizes = [param.numel() for param in params]
        self.flat = params[0].new_zeros(sum(sizes) + len(params))
        *views, self.used = self.flat.split([*sizes, len(params)])
        self.views = {p: view.view_as(p) for p, view in zip(params, views, strict=True)}
        self.waiting_for = set(params)
        self.work = None  # the all_reduce on its way

    def is_full(self) -> bool:
        return not self.waiting_for

    def add(self, param: nn.Parameter) -> None:
        """Put this parameter's gradient, divided by the number of ranks, into the buffer.

        Divided before the sum, which might overflow in fp16. From here on .grad is the view: the
        sum arrives in it and is not copied back, and a second set of gradients is not held. What is
        left is this one write. After zero_grad(), which sets .grad to None, autograd puts a new
        tensor there, and the write is a copy; after zero_grad(set_to_none=False) autograd adds into
        the view, and only the division is left, in place.
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
        if self.waiting_for:  # asked only then: on a GPU, reading a number waits for the GPU
            for (param, view), used in zip(self.views.items(), self.used.tolist(), strict=True):
                if used and param.grad is None:
                    param.grad = view  # another rank had a gradient
        self.waiting_for = set(self.views)
        self.work = None


if __name__ == "__main__":
    main()
