"""DistributedDataParallel by hand: the idea, and what makes it fast. Run ddp_from_scratch.py.

After backward, average each gradient over the ranks: that is all, and `NaiveDDP` does just that.
`BucketedDDP` sends few large messages instead of many small ones, while backward still computes.
"""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable


class NaiveDDP(nn.Module):
    """Averages gradients over all ranks, one blocking all_reduce per parameter, after backward.

    Used like torch's DistributedDataParallel. A parameter that this rank did not use counts as a
    zero gradient (and gets one even if no rank used it): every rank must make the same calls.
    Parameters that are frozen when it is built stay out. Not for a module on several devices.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.sync, self.in_backward = True, False
        # parameters() names a tied parameter once. Its hook runs once, too: after all uses.
        self.params = [p for p in module.parameters() if p.requires_grad]
        for tensor in (*module.parameters(), *module.buffers()):
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
        before, self.sync = self.sync, False
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
        self.buckets, group, size = [], [], 0
        for param in reversed(self.params):
            if group and (size >= bucket_cap_mb * 2**20 or param.dtype != group[0].dtype):
                self.buckets.append(Bucket(group))
                group, size = [], 0
            group.append(param)
            size += param.nbytes
        self.buckets += [Bucket(group)] if group else []
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}
        self.started = 0  # buckets of this backward that are on their way
        self.backward_end = 0.0  # for the timeline, like Bucket.start_time

    @torch.no_grad()
    def on_gradient(self, param: nn.Parameter) -> None:
        super().on_gradient(param)
        if self.sync:
            self.bucket_of[param].add(param)
            while self.started < len(self.buckets) and not self.buckets[self.started].waiting_for:
                self.buckets[self.started].start()
                self.started += 1

    @torch.no_grad()
    def on_backward_end(self) -> None:
        self.in_backward, self.backward_end = False, time.perf_counter()
        for bucket in self.buckets[self.started :]:  # those that miss a gradient, and those behind
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0


class Bucket:
    """A flat buffer with the gradients of some parameters, and one more number per parameter.

    That number, 1 where this rank has a gradient, is summed like the rest: 0 means that none has.
    """

    def __init__(self, params: list[nn.Parameter]):
        sizes = [param.numel() for param in params]
        self.flat = params[0].new_zeros(sum(sizes) + len(params))
        *views, self.used = self.flat.split([*sizes, len(params)])
        self.views = {p: view.view_as(p) for p, view in zip(params, views, strict=True)}
        self.waiting_for, self.work, self.start_time = set(params), None, 0.0

    def add(self, param: nn.Parameter) -> None:
        # Scaled before the sum, which might overflow in fp16. From here on .grad is the view, so
        # that the sum need not be copied back, and gradients of later backwards add to it in place.
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
        self.start_time = time.perf_counter()
        self.work = dist.all_reduce(self.flat, async_op=True)  # returns at once

    def finish(self) -> None:
        self.work.wait()
        if self.waiting_for:  # asked only then: on a GPU, reading a number waits for the GPU
            for (param, view), used in zip(self.views.items(), self.used.tolist(), strict=True):
                if used and param.grad is None:
                    param.grad = view  # another rank had a gradient
        self.waiting_for, self.work = set(self.views), None
