"""Programs that break a rule of GPUs, each next to the same without the mistake.

Started by test_emulated_gpu.py: prints one line of JSON, from the name of each function to what
happened: "fine", or the type and text of the error. If the program has broken a rule of the device,
RULES has where that rule is written, and what happened without the rule.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from emulated_gpu.cuda import device as emulated

SIZE = 1 << 12
RULES = {}  # name -> (FILE:LINE, outcome)


def streams() -> tuple[torch.Tensor, torch.cuda.Stream]:
    return torch.ones(SIZE, device="cuda"), torch.cuda.Stream()


# ---- one process


def cpu_and_gpu():
    return torch.ones(3, device="cuda") + torch.ones(3)


def cpu_and_gpu_fixed():
    return torch.ones(3, device="cuda") + torch.ones(3).cuda() + torch.tensor(1.0)  # a number may


def two_gpus():
    return torch.ones(3, device="cuda:0") @ torch.ones(3, device="cuda:1")


def generator_of_the_cpu():
    return torch.rand(3, device="cuda", generator=torch.Generator())


def generator_of_the_cpu_fixed():
    return torch.rand(3, device="cuda", generator=torch.Generator("cuda"))


def numpy_of_a_gpu():
    return torch.ones(3, device="cuda").numpy()


def device_that_is_not_there():
    return torch.ones(3, device="cuda:7")


def read_too_early():
    copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    assert copy.tolist() == [1, 1, 1], copy.tolist()


def read_too_early_fixed():
    copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert copy.tolist() == [1, 1, 1], copy.tolist()


def change_what_is_sent():
    batch = torch.ones(3, pin_memory=True)
    on_gpu = batch.to("cuda", non_blocking=True)
    batch.fill_(2)
    assert on_gpu.tolist() == [1, 1, 1], on_gpu.tolist()


def change_what_is_sent_fixed():
    batch = torch.ones(3, pin_memory=True)
    on_gpu = batch.to("cuda", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    batch.fill_(2)
    assert on_gpu.tolist() == [1, 1, 1], on_gpu.tolist()


def no_wait_before():
    x, side = streams()
    with torch.cuda.stream(side):
        x.mul_(2)


def no_wait_before_fixed():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)


def no_wait_after():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    return x.sum()


def no_wait_after_fixed():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
        done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    return x.sum()


def event_before_the_kernel():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        done = side.record_event()
        x.mul_(2)
    torch.cuda.current_stream().wait_event(done)
    return x.sum()


def two_readers_fixed():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = x.sum()
    second = x.sum()
    torch.cuda.synchronize()
    return first + second


def two_halves_fixed():
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[: SIZE // 2].mul_(2)
    x[SIZE // 2 :].mul_(3)


def freed_too_early(record: bool = False):
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if record:
        x.record_stream(side)
    del x
    return torch.zeros(SIZE, device="cuda")  # may get the memory of x, which is still read


def freed_too_early_fixed():
    return freed_too_early(record=True)


def out_of_memory():
    return torch.empty(1 << 41, dtype=torch.uint8, device="cuda")


def memory_fixed():
    """AdamW holds parameters, gradients and two moments: 16 bytes for each parameter."""
    before = torch.cuda.memory_allocated()
    layer = torch.nn.Linear(1024, 1023, device="cuda", bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    held = torch.cuda.memory_allocated() - before
    assert held == 16 * 1024 * 1023, held
    assert torch.cuda.max_memory_allocated() > torch.cuda.memory_allocated()


def stack_with_the_cpu():
    return torch.stack([torch.ones((), device="cuda"), torch.ones(())])


def product_with_the_cpu():
    """A number on the CPU is an argument of pointwise operations, and of no other."""
    x = torch.ones(2, 2, device="cuda")
    return torch.addmm(torch.ones(()), x, x)


def index_on_the_gpu():
    return torch.ones(3)[torch.tensor([0], device="cuda")]


def values_on_the_cpu():
    x = torch.zeros(3, device="cuda")
    x[torch.tensor([0, 1])] = torch.ones(2)


def values_on_the_cpu_fixed():
    x = torch.zeros(3, device="cuda")
    x[torch.tensor([0, 1])] = torch.ones(2, device="cuda")
    x[torch.tensor([2])] = torch.tensor(5.0)
    assert x.tolist() == [1, 1, 5]


def pinned_gpu():
    return torch.empty(3, device="cuda", pin_memory=True)


def pinned_strides_of_a_gpu():
    return torch.empty_strided((3,), (1,), device="cuda", pin_memory=True)


def storage_of_the_cpu():
    return torch.empty(0, device="cuda").set_(torch.ones(3).untyped_storage())


def wait_in_debug_mode():
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        return x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_waits_fixed():
    """How often the host waits, as on a real GPU."""
    x, mask = torch.ones(4, device="cuda"), torch.tensor([True, False] * 2, device="cuda")
    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    for expected, program in (
        (1, lambda: x[mask]),
        (0, lambda: x.__setitem__(mask, 2.0)),
        (1, lambda: x.__setitem__(mask, torch.ones(2, device="cuda"))),
        (1, lambda: x[torch.tensor([0, 2])]),
        (
            0,
            lambda: x[
                torch.tensor([0, 2], device="cpu").pin_memory().to("cuda", non_blocking=True)
            ],
        ),
        (1, lambda: pageable.to("cuda", non_blocking=True)),
        (1, lambda: pageable.copy_(x, non_blocking=True)),
        (0, lambda: pinned.to("cuda", non_blocking=True)),
        (0, lambda: x.to("cpu", non_blocking=True)),
        (0, lambda: torch.cuda.current_stream().query()),
        (1, lambda: x.sum().item()),
    ):
        before = emulated.host_waits()
        program()
        assert emulated.host_waits() - before == expected, program.__code__.co_firstlineno


def query_fixed():
    """After query() returned True, the copies before the event or in the stream are complete."""
    for ask in (lambda: torch.cuda.current_stream().record_event(), torch.cuda.current_stream):
        copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        assert ask().query()
        assert copy.tolist() == [1, 1, 1], copy.tolist()


def copy_to_a_peer():
    """The copy waits for the current streams of both GPUs, and only these wait for it."""
    x = torch.ones(SIZE, device="cuda:0")
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        there = x.to("cuda:1")
    return there.sum()


def copy_to_a_peer_fixed():
    x, there = torch.ones(SIZE, device="cuda:0"), torch.zeros(SIZE, device="cuda:1")
    there.mul_(3)
    there.copy_(x)
    x.mul_(2)
    assert there.sum().item() == SIZE


# ---- two ranks


def cpu_tensor_for_nccl():
    dist.all_reduce(torch.ones(3))


def cpu_tensor_for_its_backend():
    dist.group.WORLD._get_backend(torch.device("cuda")).allreduce([torch.ones(3)]).wait()


def gpu_of_another_rank():
    dist.all_reduce(torch.ones(3, device=f"cuda:{1 - dist.get_rank()}"))


def not_contiguous():
    dist.all_reduce(torch.ones(3, 4, device="cuda").T)


def type_of_nccl():
    dist.all_reduce(torch.ones(3, dtype=torch.int16, device="cuda"))


def gloo_sends_a_gpu():
    """Its sockets cannot read a GPU's memory. The collectives copy to the host and back."""
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x, group=join_gloo())
    assert x.tolist() == [2, 2, 2]
    if dist.get_rank() == 0:
        dist.send(x, 1, group=join_gloo())
    else:
        dist.recv(x, 0, group=join_gloo())


@cache
def join_gloo():
    return dist.new_group(backend="gloo")


def freed_on_another_stream(work: bool = True, wait: bool = False):
    """Work.wait() orders the current stream only; the memory goes back to the stream it is from."""
    x, side = streams()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if work:
            dist.all_reduce(x, async_op=True).wait()
        else:
            dist.all_reduce(x)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    del x
    return torch.zeros(SIZE, device="cuda")


def freed_on_another_stream_fixed():
    freed_on_another_stream(wait=True)


def freed_after_the_call():
    """With async_op=False it is a kernel of the current stream, and keeps no tensor."""
    freed_on_another_stream(work=False)


def freed_after_the_call_fixed():
    freed_on_another_stream(work=False, wait=True)


def future_of_another():
    x, y = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    first = dist.all_reduce(x, async_op=True).get_future()
    second = dist.all_reduce(y, async_op=True)
    try:
        first.wait()
        assert x.sum().item() == 2 * SIZE
        y.sum()
    finally:
        second.wait()


def future_of_another_fixed():
    both = torch.ones(2, 1 << 20, device="cuda")
    futures = [dist.all_reduce(x, async_op=True).get_future() for x in both]
    for future in futures:
        future.wait()
    assert both.sum().item() == 2 * both.numel()


def nobody_waits_fixed():
    """The group keeps what it still writes to, and a synchronization finishes it."""
    for _ in range(20):
        dist.all_reduce(torch.ones(SIZE, device="cuda"), async_op=True)
        zeros = torch.zeros(SIZE, device="cuda")
    big = torch.ones(1 << 22, device="cuda")
    dist.all_reduce(big, async_op=True)
    torch.cuda.synchronize()
    assert zeros.sum().item() == 0
    assert big.sum().item() == 2 * big.numel()
    dist.all_reduce(big, async_op=True)
    dist.all_reduce(zeros)  # comes after it
    assert big.sum().item() == 4 * big.numel()


def future_of_a_group(wait: bool = False):
    """PyTorch's future of coalesced operations has no value, and so orders nothing."""
    rank, other = dist.get_rank(), torch.zeros(1 << 20, device="cuda")
    mine = torch.full_like(other, rank + 1)
    sends = dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)
    (work,) = dist.batch_isend_irecv([*sends])
    work.wait() if wait else work.get_future().wait()
    assert other.sum().item() == (2 - rank) * other.numel()


def future_of_a_group_fixed():
    future_of_a_group(wait=True)


def barrier_fixed():
    """The host waits for it and for all that comes before it."""
    before = emulated.host_waits()
    copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    dist.barrier()
    assert copy.tolist() == [1, 1, 1]
    assert emulated.host_waits() - before == 1


def bits_of_nccl():
    dist.all_reduce(torch.ones(3, dtype=torch.int64, device="cuda"), op=dist.ReduceOp.BAND)


def no_wait_for_work(wait: bool = False):
    x = torch.ones(SIZE, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    try:
        if wait:
            work.wait()
        assert x.tolist() == [2] * SIZE
    finally:
        work.wait()


def no_wait_for_work_fixed():
    no_wait_for_work(wait=True)


def operations_fixed():
    """What the templates use, with known results."""
    rank = dist.get_rank()
    x = torch.full((4,), rank + 1.0, device="cuda")
    for op, expected in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2)):
        y = x.clone()
        dist.all_reduce(y, op=op)
        assert y.tolist() == [expected] * 4, (op, y)
    y = x.clone()
    dist.all_reduce(y, op=dist._make_nccl_premul_sum(0.5))
    assert y.tolist() == [1.5] * 4
    all_of_them = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(all_of_them, x)
    assert all_of_them.tolist() == [1] * 4 + [2] * 4
    mine = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(mine, all_of_them, op=dist.ReduceOp.AVG)
    assert mine.tolist() == [rank + 1] * 4
    other = torch.empty(4, device="cuda")
    sends = dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)
    for work in dist.batch_isend_irecv([*sends]):
        work.wait()
    assert other.tolist() == [2 - rank] * 4
    dist.all_to_all_single(other, x)
    assert other.tolist() == [1, 1, 2, 2]


# ---- a race that gives a wrong number, with EMULATED_GPU_RACES=show


def read_before_written():
    x, side = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(side):  # and no side.wait_stream()
        y = x * 2
    torch.cuda.synchronize()
    assert y.tolist() == [2, 2, 2], y.tolist()


def read_before_computed():
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    z = y + 1  # and no wait_stream(side)
    assert z.tolist() == [3, 3, 3], z.tolist()


def read_before_received():
    x = torch.ones(3, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    y = x + 0  # and no work.wait()
    work.wait()
    assert y.tolist() == [2, 2, 2], y.tolist()


def waits_fixed():
    """The three above, with the wait."""
    x, side = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    x.fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        y[1:].add_(1)
    torch.cuda.current_stream().wait_stream(side)
    dist.all_reduce(y, async_op=True).wait()
    assert (y + 1).tolist() == [5, 7, 7], y.tolist()


def main() -> None:
    names = sys.argv[1:]
    if "WORLD_SIZE" in os.environ:
        device = 0 if "two_ranks_on_one_gpu" in names else None
        join(device)
    happened = {name: outcome(name) for name in names}
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(json.dumps({"rank": rank, **happened, "RULES": RULES}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def join(index: int | None) -> None:
    """NCCL alone: a group for CPU tensors beside it would send them."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if index is None else index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))


def outcome(name: str) -> str:
    emulated.switch_off("")
    said = run(globals()[name])
    rule = emulated.broken_rule()
    if rule:
        RULES[name] = rule, ""
        emulated.switch_off(rule)
        RULES[name] = rule, run(globals()[name])
    return said


def run(program: Callable) -> str:
    torch.cuda.synchronize()  # what the one before has left is over
    try:
        program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


if __name__ == "__main__":
    main()
