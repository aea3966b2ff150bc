"""Cases of test_custom_backend_pipe.py: pipe_cases.py CASE FOLDER writes FOLDER/RANK.json."""

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import pipe
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = (0, 1, 5, 4097, 300_000)  # the last is larger than a pipe, in every dtype


def main() -> None:
    pipe.compiled()
    name, *arguments = CASE.split(":")
    save(globals()[name](*arguments))


def save(found) -> None:
    unfinished = FOLDER / f"{RANK}.unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(FOLDER / f"{RANK}.json")


def join(seconds: float = 120, backend: str = "pipe") -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def told(call, *args, **options) -> dict:
    """The error that a call raises, after how many seconds, and when (in seconds since 1970)."""
    began, message = time.monotonic(), ""
    try:
        call(*args, **options)
    except RuntimeError as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - began, "at": time.time()}


# ---- right numbers


def equal() -> list[str]:
    """Each collective, dtype, size and layout, on pipe and on Gloo; the dtypes that Gloo has."""
    join(backend="gloo")
    group, dtypes = dist.new_group(backend="pipe"), []
    every = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    for dtype in every:
        try:
            dist.all_reduce(torch.zeros(1, dtype=dtype))
        except (RuntimeError, ValueError):
            continue  # Gloo does not have it
        dtypes.append(str(dtype).removeprefix("torch."))
        for numel in SIZES:
            for make in (whole, every_other, transposed):
                compare(group, lambda n=numel, m=make, d=dtype: m(n, d))
    leave()
    return dtypes


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers: their sums are exact in every dtype and in every order."""
    return (torch.arange(numel) % 7 + RANK).to(dtype)


def whole(numel, dtype):
    return numbers(numel, dtype)


def every_other(numel, dtype):
    return numbers(2 * numel, dtype)[::2]


def transposed(numel, dtype):
    return numbers(numel, dtype).view(-1, 5 if numel % 5 == 0 and numel else 1).t()


def compare(group, make) -> None:
    def run(group, make):
        summed, sent = make(), make()
        gathered = [torch.empty_like(make()) for _ in range(SIZE)]
        dist.all_reduce(summed, group=group)
        dist.broadcast(sent, src=SIZE - 1, group=group)
        dist.all_gather(gathered, make().contiguous(), group=group)
        return [summed, sent, *gathered]

    # Gloo gets tensors without gaps: of x[::2] it changes other numbers, and says nothing.
    gloos = run(None, lambda: make().clone(memory_format=torch.contiguous_format))
    for ours, gloo in zip(run(group, make), gloos, strict=True):
        assert ours.dtype == gloo.dtype
        assert torch.equal(as_bytes(ours), as_bytes(gloo)), (ours, gloo)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """torch.equal does not know the newest dtypes."""
    dense = tensor.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8)


def parameters() -> None:
    """In-place changes of a leaf that needs gradients, and of an inference tensor."""
    join()
    leaf = nn.Parameter(torch.full((3, 4), float(RANK)))
    dist.broadcast(leaf.t(), src=SIZE - 1, async_op=True).wait()
    assert (leaf == SIZE - 1).all()
    assert leaf.grad_fn is None
    with torch.inference_mode():
        tensor = torch.ones(3, 4).t()
        dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor == SIZE).all()
    leave()


def many() -> int:
    """Hundreds of operations in flight; the caller drops inputs, and waits in another order."""
    join()
    order, works = random.Random(RANK), []
    shared = random.Random(0)
    for index in range(300):
        numel, kind = shared.choice((1, 100, 100_000)), shared.choice(("sum", "send", "gather"))
        x = torch.full((numel,), index + RANK)
        if kind == "sum":
            work, results = dist.all_reduce(x, async_op=True), [x]
            expected = [index * SIZE + sum(range(SIZE))]
        elif kind == "send":
            root = index % SIZE
            work, results = dist.broadcast(x, src=root, async_op=True), [x]
            expected = [index + root]
        else:
            results = [torch.empty_like(x) for _ in range(SIZE)]
            work = dist.all_gather(results, x + 0, async_op=True)  # nobody else holds x + 0
            expected = [index + r for r in range(SIZE)]
        works.append((work, results, expected))
    order.shuffle(works)
    for work, results, expected in works:
        if order.random() < 0.5:
            work.get_future().wait()
        work.wait()
        for result, value in zip(results, expected, strict=True):
            assert (result == value).all(), (result, value)
    leave()
    return len(works)


def callbacks() -> list:
    """A callback in Python, in rank 0's worker, calls a collective and outlives the group."""
    join()
    x, y, is_inside = torch.ones(2), torch.ones(2), threading.Event()
    works, waited = [], []

    def then(future):
        works.append(dist.all_reduce(y, async_op=True))
        waited.append(told(works[0].wait)["message"])
        is_inside.set()
        time.sleep(0.2)  # the main thread is in destroy_process_group() when this needs the GIL
        return future.value()[0].tolist()

    store = dist.distributed_c10d._get_default_store()  # no public name
    if RANK == 1:
        store.wait(["rank 0 has its callback"])  # so that its future was not complete before
    future = dist.all_reduce(x, async_op=True).get_future().then(then)
    store.set("rank 0 has its callback", "")
    is_inside.wait(60)
    dist.destroy_process_group()
    works[0].wait()
    return [future.wait(), y.tolist(), *waited]


def train() -> None:
    """Losses, gradients and parameters of five steps, on SIZE ranks and in one process."""
    join()
    ours, alone = steps(RANK, SIZE), steps(0, 1)
    torch.save({"ours": ours, "alone": alone}, FOLDER / f"{RANK}.pt")
    leave()


def steps(rank: int, size: int) -> dict[str, list]:
    torch.manual_seed(0)
    x, y = torch.randn(12, 64), torch.randn(12, 1)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.1) if size > 1 else model
    found = {"gradients": [], "parameters": []}
    for _ in range(5):
        optimizer.zero_grad()
        (ddp_model(x[rank::size]) - y[rank::size]).square().mean().backward()
        optimizer.step()
        found["gradients"] += [p.grad.clone() for p in model.parameters()]
    found["parameters"] = [p.detach().clone() for p in model.parameters()]
    return found


# ---- failures


def dies(how: str):
    """The last rank, a child of its job, is killed in the middle of an all_reduce, or before it."""
    if RANK == SIZE - 1 and os.fork():
        os.wait()
        raise SystemExit
    join()
    if RANK == SIZE - 1:
        if how == "inside":
            dist.all_reduce(torch.ones(50_000_000), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    found = told(dist.all_reduce, torch.ones(50_000_000))
    return [found, told(dist.barrier)]


def missing():
    """The last rank does not call the second operation."""
    join()
    dist.barrier()
    # no public names: the test's own meeting, and an operation with its own time limit
    store = dist.distributed_c10d._get_default_store()
    group = dist.distributed_c10d._get_default_group()
    others_gave_up = [f"gave up {rank}" for rank in range(SIZE - 1)]
    if RANK == SIZE - 1:
        store.wait(others_gave_up)
        return [told(dist.barrier)]
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=3)
    found = told(lambda: group.allreduce([torch.ones(3)], options).wait())
    store.set(f"gave up {RANK}", "")
    store.wait(others_gave_up)  # a rank that ended earlier would end the others' waiting
    return [found]


def alone():
    """Rank 1 never joins."""
    if RANK == 1:
        while not (FOLDER / "0.json").exists():
            time.sleep(0.01)
        return []
    store = dist.FileStore(str(FOLDER / "store"), 2)
    return [
        told(
            dist.init_process_group,
            "pipe",
            store=store,
            rank=RANK,
            world_size=SIZE,
            timeout=timedelta(seconds=3),
        )
    ]


def mismatch(what: str):
    join()
    if what == "size":
        return [told(dist.all_reduce, torch.ones(3 + RANK))]
    if what == "dtype":
        return [told(dist.all_reduce, torch.ones(4, dtype=(torch.int32, torch.float32)[RANK]))]
    if what == "root":
        return [told(dist.broadcast, torch.ones(3), src=RANK)]
    call = (dist.all_reduce, lambda x: dist.broadcast(x, src=0))[RANK]
    return [told(call, torch.ones(3))]


def local():
    """Only rank 0 fails, in its worker: it has no memory for a copy without gaps."""
    join()
    x = torch.ones(25_000_000, 2 - RANK)[:, 0]  # rank 0's has gaps, rank 1's has none
    if RANK == 0:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 50_000_000, most))
    return [told(dist.all_reduce, x), told(dist.barrier)]


def patience():
    """A limit of Work.wait() is the caller's own: the operation goes on."""
    join()
    x, store = torch.ones(3), dist.distributed_c10d._get_default_store()  # no public name
    if RANK == 1:
        store.wait(["has waited"])
    work = dist.all_reduce(x, async_op=True)
    found = [told(work.wait, timedelta(milliseconds=200))] if RANK == 0 else []
    store.set("has waited", "")
    work.wait()
    leave()
    return [*found, x.tolist()]


def dtype():
    """torch cannot add this dtype: all ranks hear of it at once, and the group still works."""
    join()
    found = told(dist.all_reduce, torch.ones(3).to(torch.float8_e4m3fn))
    x = torch.ones(3)
    dist.all_reduce(x)
    leave()
    return [found, x.tolist()]


def others_sleep() -> bool:
    """Whether all threads of this process but this one sleep."""
    threads = [t for t in Path("/proc/self/task").iterdir() if t.name != str(os.getpid())]
    return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "S" for t in threads)


def left():
    """A destroyed group, and a child of a fork, refuse calls. The child may destroy its copy."""
    join()
    group = dist.distributed_c10d._get_default_group()  # no public name: a handle to keep
    dist.barrier()
    while not others_sleep():  # until the worker waits for the next operation
        time.sleep(0.01)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
    else:
        signal.alarm(30)  # should it hang
        message = told(group.barrier)["message"]
        del group  # so the next line frees it
        dist.destroy_process_group()
        os._exit(0 if "this process is a fork" in message else 1)
    leave()
    return [status, told(group.allreduce, [torch.ones(1)])]


if __name__ == "__main__":
    main()
