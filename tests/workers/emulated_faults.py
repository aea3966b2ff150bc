"""Programs that break a rule of GPUs, each next to the same without the mistake.

Started by test_emulated_gpu.py: prints one line of JSON, from the name of each function to what
happened: "fine", or the type and text of the error.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

SIZE = 1 << 12


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


# ---- two ranks


def cpu_tensor_for_nccl():
    dist.all_reduce(torch.ones(3))


def gpu_of_another_rank():
    if dist.get_rank() == 1:  # rank 1 is on cuda:1
        dist.all_reduce(torch.ones(3, device="cuda:0"))


def not_contiguous():
    dist.all_reduce(torch.ones(3, 4, device="cuda").T)


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


def main() -> None:
    names = sys.argv[1:]
    if "cpu_tensor_for_nccl" in names or "two_ranks_on_one_gpu" in names:
        device = 0 if "two_ranks_on_one_gpu" in names else None
        join(device)
    happened = {name: outcome(globals()[name]) for name in names}
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(json.dumps({"rank": rank, **happened}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def join(index: int | None) -> None:
    """NCCL alone: a group for CPU tensors beside it would send them."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if index is None else index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))


def outcome(program: Callable) -> str:
    torch.cuda.synchronize()  # what the one before has left is over
    try:
        program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


if __name__ == "__main__":
    main()
