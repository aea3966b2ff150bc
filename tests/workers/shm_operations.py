"""Call every operation of the backend "shm"; compare its results with a plain computation.

test_custom_backend_shm.py starts it with 1 to 8 ranks. A seed gives the inputs of each rank, so
every rank knows the inputs of all ranks, and its expected results. Rank r saves r.json: for each
operation the number of compared cases, and which of them were wrong.
"""

import functools
import itertools
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import numpy as np
import shm
import torch
import torch.distributed as dist

# DTensor and torch.compile call these; they have no public names.
import torch.distributed._functional_collectives as functional

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.bool, *SIGNED, *UNSIGNED, *FLOATS, torch.complex64)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 0.3
# Bytes around the limits of layout.h and collectives.h: one round up to 16 KB, pieces of 32 to
# 128 KB, a slot, all four of a rank, and more.
KB = 1024
LIMITS = (0, 4, 16 * KB, 16 * KB + 4, 128 * KB + 4, 1300 * KB + 20)
if os.environ.get("WORLD_SIZE") == "2":  # all of them if it costs little
    LIMITS += (28, 16 * KB - 4, 32 * KB + 4, 128 * KB - 4, 128 * KB, 512 * KB, 512 * KB + 4)
PLACES = ("private", "heap", "mixed", "gaps")

# New names in torch 2.13, where the old ones warn.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")  # of names that torch will drop, and of uint16 in arithmetic
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = None if size > 1 else dist.HashStore()
    minute = timedelta(minutes=1)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=minute)
    found = {}
    for operation in OPERATIONS:
        cases, wrong = 0, []
        for name, got, expected in operation(rank, size):
            cases += 1
            if not same(got, expected):
                wrong.append(f"{name}: got {shown(got)}, expected {shown(expected)}")
        found[operation.__name__] = {"cases": cases, "wrong": wrong[:5]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def given(rank: int, shape, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The input of `rank`: integers of all sizes, so that sums overflow; floats around 0."""
    return made(rank, (shape,) if isinstance(shape, int) else tuple(shape), dtype, salt).clone()


@functools.lru_cache(maxsize=200)
def made(rank: int, shape: tuple, dtype: torch.dtype, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.complex64:
        return torch.view_as_complex(torch.randn((*shape, 2), generator=generator))
    if dtype in FLOATS:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    numbers = torch.randint(-(2**62), 2**62, shape, generator=generator)
    return numbers % 2 == 1 if dtype == torch.bool else numbers.to(dtype)


def combined(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Combine the numbers of all ranks in rank order; half precision in float."""
    dtype = tensors[0].dtype
    if dtype not in (*FLOATS, torch.complex64):
        arrays = [tensor.numpy() for tensor in tensors]
        functions = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
        functions |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = functions[op](total, array)
        return torch.from_numpy(np.asarray(total))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensors = [tensor.to(wide, copy=True) for tensor in tensors]
    if op == "PREMUL_SUM":
        factor = torch.tensor(FACTOR, dtype=wide)
        tensors = [torch.zeros_like(tensors[0])] + [tensor * factor for tensor in tensors]
    functions = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    total = tensors[0]
    for tensor in tensors[1:]:
        total = functions.get(op, torch.add)(total, tensor)
    if op == "AVG":
        parts = torch.view_as_real(total) if total.is_complex() else total
        parts /= torch.full_like(parts, len(tensors))  # (by a number, torch may multiply instead)
    return total.to(dtype)


def reduce_op(op: str):
    if op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)  # no public function makes one
    return getattr(dist.ReduceOp, op)


def knows(dtype: torch.dtype, op: str) -> bool:
    """Whether shm supports it: what Gloo supports, and PREMUL_SUM."""
    if op in ("BAND", "BOR", "BXOR"):
        return dtype not in (*FLOATS, torch.complex64)
    if op in ("AVG", "PREMUL_SUM"):
        return dtype in (*FLOATS, torch.complex64)
    return op == "SUM" or dtype != torch.complex64


def place(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Copy the tensor to private memory, to the heap, or with gaps between its numbers."""
    odd = dist.get_rank() % 2 == 1
    if where == "heap" or (where == "mixed" and odd):
        return shm.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if where == "gaps":
        return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0].copy_(tensor)
    return tensor.clone()


def same(a, b) -> bool:
    """Whether all bits are equal; any NaN equals any other."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, torch.Tensor):
        return a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = a.nan_to_num(0, torch.inf, -torch.inf), b.nan_to_num(0, torch.inf, -torch.inf)
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def shown(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.reshape(-1)[:6].tolist()}"
    return str(value)[:200]


def moved() -> list[tuple]:
    """(dtype, numbers, place) for operations that only copy numbers."""
    cases = [(dtype, n, "private") for dtype in DTYPES for n in (0, 1, 7)]
    return cases + [(torch.float32, n // 4, where) for n in LIMITS for where in PLACES]


# Each function below yields (name of the case, result, expected result).


def all_reduce(rank: int, size: int):
    for dtype, op, n in itertools.product(DTYPES, OPS, (1, 7, 5001)):
        if knows(dtype, op):
            x = given(rank, n, dtype)
            dist.all_reduce(x, reduce_op(op))
            yield (dtype, op, n), x, combined([given(r, n, dtype) for r in range(size)], op)
    wide = (torch.float32, torch.bfloat16, torch.uint8)
    for dtype, n in itertools.product(wide, LIMITS):
        n //= torch.empty(0, dtype=dtype).element_size()
        expected = combined([given(r, n, dtype) for r in range(size)], "SUM")
        for where in PLACES:
            x = place(given(rank, n, dtype), where)
            dist.all_reduce(x)
            yield (dtype, n, where), x, expected


def all_reduce_of_every_half(rank: int, size: int):
    """Reduce every 16-bit number with itself or another: subnormal, infinite, NaN."""
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(2**16).to(torch.uint16).view(dtype)
        numbers = [patterns]
        for r in range(1, size):
            order = torch.randperm(2**16, generator=torch.Generator().manual_seed(r))
            numbers.append(patterns[order])
        x = numbers[rank].clone()
        dist.all_reduce(x)
        yield dtype, x, combined(numbers, "SUM")


def all_reduce_of_100_mb(rank: int, size: int):
    if size == 2:
        for where in ("private", "heap"):
            x = place(given(rank, 25_000_003, torch.float32), where)
            dist.all_reduce(x)
            yield where, x, combined([given(r, len(x), x.dtype) for r in range(size)], "SUM")


def written_past_the_caches(rank: int, size: int):
    """Outputs of more than 4 MB, at addresses that are multiples of 16 and that are not."""
    if size != 2:
        return
    for first in (0, 1):  # the offset of the tensor in its memory
        counts = (1_200_003, 1_100_001)
        inputs = [given(r, first + n, torch.float32)[first:] for r, n in enumerate(counts)]
        outputs = [torch.zeros(first + n)[first:] for n in counts]
        dist.all_gather(outputs, inputs[rank])
        yield ("all_gather", first), outputs, inputs
        for root, n in enumerate(counts):
            x = inputs[rank].clone() if rank == root else torch.zeros(first + n)[first:]
            dist.broadcast(x, root)
            yield ("broadcast", first, root), x, inputs[root]
        mine = [counts[1] * r for r in range(size + 1)]
        whole = torch.zeros(first + mine[-1])[first:]
        whole[mine[rank] : mine[rank + 1]] = inputs[rank][: counts[1]]
        all_gather_single(whole, whole[mine[rank] : mine[rank + 1]])  # in place
        yield ("in place", first), whole, torch.cat([x[: counts[1]] for x in inputs])


def all_reduce_coalesced(rank: int, size: int):
    shapes = ((3,), (0,), (7, 5), (50_000,))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [given(rank, shape, dtype, i) for i, shape in enumerate(shapes)]
        dist.all_reduce_coalesced(tensors)
        expected = [
            combined([given(r, shape, dtype, i) for r in range(size)], "SUM")
            for i, shape in enumerate(shapes)
        ]
        yield dtype, tensors, expected


def all_reduce_of_sparse_tensors(rank: int, size: int):
    def sparse(r: int, values: tuple) -> torch.Tensor:
        indices = torch.randint(0, 9, (1, r + 2), generator=torch.Generator().manual_seed(r))
        return torch.sparse_coo_tensor(indices, torch.ones(r + 2, *values), (9, *values))

    for values in ((), (3,)):
        x = sparse(rank, values)
        dist.all_reduce(x)
        yield values, x.to_dense(), sum(sparse(r, values).to_dense() for r in range(size))
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (9,))
    dist.all_reduce(empty)
    yield "empty", empty.to_dense(), torch.zeros(9)


def reduce(rank: int, size: int):
    cases = [(dtype, op, 7, "private") for dtype in DTYPES for op in OPS if knows(dtype, op)]
    cases += [
        (torch.float32, "SUM", n // 4, where) for n, where in itertools.product(LIMITS, PLACES)
    ]
    for dtype, op, n, where in cases:
        for root in {0, size - 1}:
            x = place(given(rank, n, dtype), where)
            dist.reduce(x, root, reduce_op(op))
            all_ranks = [given(r, n, dtype) for r in range(size)]
            expected = combined(all_ranks, op) if rank == root else all_ranks[rank]
            yield (dtype, op, n, where, root), x, expected


def broadcast(rank: int, size: int):
    for (dtype, n, where), root in itertools.product(moved(), {0, size - 1}):
        x = place(given(rank, n, dtype), where)
        dist.broadcast(x, root)
        yield (dtype, n, where, root), x, given(root, n, dtype)


def all_gather(rank: int, size: int):
    for dtype, n, where in moved():
        x = place(given(rank, n, dtype), where)
        expected = [given(r, n, dtype) for r in range(size)]
        outputs = [place(torch.zeros(n, dtype=dtype), where) for _ in range(size)]
        dist.all_gather(outputs, x)
        yield ("list", dtype, n, where), outputs, expected
        whole = place(torch.zeros(size * n, dtype=dtype), where)
        all_gather_single(whole, x)
        yield ("single", dtype, n, where), whole, torch.cat(expected)
    for n in (1, 3000, 90_000):  # uneven: rank r sends (r + 1) % 3 times n
        sizes = [(r + 1) % 3 * n for r in range(size)]
        outputs = [torch.zeros(s) for s in sizes]
        dist.all_gather(outputs, given(rank, sizes[rank], torch.float32))
        yield ("uneven", n), outputs, [given(r, s, torch.float32) for r, s in enumerate(sizes)]
    shapes = ((2,), (3, 5), (9000,))
    tensors = [given(rank, shape, torch.float32, i) for i, shape in enumerate(shapes)]
    lists = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(lists, tensors)
    expected = [
        [given(r, shape, torch.float32, i) for i, shape in enumerate(shapes)] for r in range(size)
    ]
    yield "coalesced", lists, expected


def gather(rank: int, size: int):
    for (dtype, n, where), root in itertools.product(moved(), {0, size - 1}):
        x = place(given(rank, n, dtype), where)
        outputs = [torch.zeros(n, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(x, outputs, root)
        expected = [given(r, n, dtype) for r in range(size)] if rank == root else None
        yield (dtype, n, where, root), outputs, expected


def scatter(rank: int, size: int):
    for (dtype, n, where), root in itertools.product(moved(), {0, size - 1}):
        parts = [given(root, n, dtype, to) for to in range(size)]
        x = place(torch.zeros(n, dtype=dtype), where)
        dist.scatter(x, [place(p, where) for p in parts] if rank == root else None, root)
        yield (dtype, n, where, root), x, parts[rank]


def reduce_scatter(rank: int, size: int):
    cases = [(dtype, op, 7, "private") for dtype in DTYPES for op in OPS if knows(dtype, op)]
    cases += [
        (torch.float32, "SUM", n // 4, where) for n, where in itertools.product(LIMITS, PLACES)
    ]
    for dtype, op, n, where in cases:
        parts = [[given(r, n, dtype, to) for to in range(size)] for r in range(size)]
        expected = combined([parts[r][rank] for r in range(size)], op)
        x = place(torch.zeros(n, dtype=dtype), where)
        dist.reduce_scatter(x, [place(p, where) for p in parts[rank]], reduce_op(op))
        yield ("list", dtype, op, n, where), x, expected
        x = place(torch.zeros(n, dtype=dtype), where)
        reduce_scatter_single(x, place(torch.cat(parts[rank]), where), reduce_op(op))
        yield ("single", dtype, op, n, where), x, expected
    for n in (1, 3000, 90_000):  # uneven: rank r receives (r + 1) % 3 times n
        sizes = [(r + 1) % 3 * n for r in range(size)]
        inputs = [given(rank, s, torch.float32, to) for to, s in enumerate(sizes)]
        x = torch.zeros(sizes[rank])
        dist.reduce_scatter(x, inputs)
        everybodys = [given(r, sizes[rank], torch.float32, rank) for r in range(size)]
        yield ("uneven", n), x, combined(everybodys, "SUM")


def all_to_all(rank: int, size: int):
    for dtype, n, where in moved():
        inputs = [place(given(rank, n, dtype, to), where) for to in range(size)]
        outputs = [place(torch.zeros(n, dtype=dtype), where) for _ in range(size)]
        dist.all_to_all(outputs, inputs)
        expected = [given(r, n, dtype, rank) for r in range(size)]
        yield ("list", dtype, n, where), outputs, expected
        whole = place(torch.zeros(size * n, dtype=dtype), where)
        dist.all_to_all_single(whole, place(torch.cat(inputs), where))
        yield ("single", dtype, n, where), whole, torch.cat(expected)
    for n in (1, 500, 20_000):

        def rows(r: int, to: int, n=n) -> int:
            return (r + 2 * to) % 3 * n

        send = [rows(rank, to) for to in range(size)]
        take = [rows(r, rank) for r in range(size)]
        x = torch.cat([given(rank, (s, 2), torch.float32, to) for to, s in enumerate(send)])
        got = torch.zeros(sum(take), 2)
        dist.all_to_all_single(got, x, take, send)
        expected = [given(r, (t, 2), torch.float32, rank) for r, t in enumerate(take)]
        yield ("uneven", n), got, torch.cat(expected)
        outputs = [torch.zeros(t, 2) for t in take]
        dist.all_to_all(outputs, list(x.split(send)))
        yield ("uneven list", n), outputs, expected


def send_and_recv(rank: int, size: int):
    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype, n, where in moved():
        if where == "gaps":
            continue
        x = place(given(rank, n, dtype), where)
        got = place(torch.zeros(n, dtype=dtype), where)
        if rank == 0:
            dist.send(x, after)
            dist.recv(got, before)
        else:
            dist.recv(got, before)
            dist.send(x, after)
        yield (dtype, n, where), got, given(before, n, dtype)
    for n in (5, 300_000):  # all tags, in reverse order
        xs, gots = [given(rank, n, torch.float32, tag) for tag in range(4)], {}
        sent = [dist.isend(x, after, tag=tag) for tag, x in enumerate(xs)]
        for tag in reversed(range(4)):
            gots[tag] = torch.zeros(n)
            dist.recv(gots[tag], before, tag=tag)
        for work in sent:
            work.wait()
        expected = [given(before, n, torch.float32, tag) for tag in range(4)]
        yield ("tags", n), [gots[tag] for tag in range(4)], expected
    for n in (5, 300_000):  # from any source: every rank sends to rank 0
        if rank == 0:
            gots = {}
            for _ in range(size - 1):
                got = torch.zeros(n)
                source = dist.recv(got)
                gots[source] = got
            yield ("any source", n), sorted(gots), list(range(1, size))
            expected = [given(r, n, torch.float32) for r in range(1, size)]
            yield ("any source", n), [gots[r] for r in sorted(gots)], expected
        else:
            dist.send(given(rank, n, torch.float32), 0)
        dist.barrier()  # else a message of the next round might come first
    for n in (0, 5, 300_000):  # every rank with every rank, at once
        gots = [torch.zeros(n) for _ in range(size)]
        others = [r for r in range(size) if r != rank]
        calls = [dist.P2POp(dist.irecv, gots[r], r) for r in others]
        calls += [dist.P2POp(dist.isend, given(rank, n, torch.float32, r), r) for r in others]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        expected = [given(r, n, torch.float32, rank) for r in others]
        yield ("batch", n), [gots[r] for r in others], expected


def barriers(rank: int, size: int):
    for _ in range(20):
        dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    yield "async", work.is_completed(), True
    # Before torch 2.15, dist.monitored_barrier accepted Gloo only.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.monitored_barrier(timedelta(seconds=20), True)
    yield "monitored", True, True


def objects(rank: int, size: int):
    mine = {"rank": rank, "text": "x" * rank * 10_000, "list": [1, None, 0.5]}
    everybodys = [{**mine, "rank": r, "text": "x" * r * 10_000} for r in range(size)]
    got = [None] * size
    dist.all_gather_object(got, mine)
    yield "all_gather_object", got, everybodys
    got = [mine]
    dist.broadcast_object_list(got, size - 1)
    yield "broadcast_object_list", got[0], everybodys[-1]
    got = [None] * size if rank == 0 else None
    dist.gather_object(mine, got)
    yield "gather_object", got, everybodys if rank == 0 else None
    got = [None]
    dist.scatter_object_list(got, everybodys if rank == 0 else None)
    yield "scatter_object_list", got[0], mine
    if size > 1:
        got = [None]
        if rank == 0:
            dist.send_object_list([mine], 1)
        elif rank == 1:
            dist.recv_object_list(got, 0)
            yield "send_object_list", got[0], everybodys[0]


def functional_collectives(rank: int, size: int):
    world = dist.group.WORLD
    for n in (24, 24 * 20_000):  # divides by all numbers of ranks
        x = given(rank, n, torch.float32)
        everybodys = [given(r, n, torch.float32) for r in range(size)]
        total, share = combined(everybodys, "SUM"), n // size
        got = functional.all_reduce(x, "sum", world)
        yield ("all_reduce", n), got + 0, total
        got = functional.all_gather_tensor(x, 0, world)
        yield ("all_gather", n), got + 0, torch.cat(everybodys)
        got = functional.reduce_scatter_tensor(x, "sum", 0, world)
        yield ("reduce_scatter", n), got + 0, total[rank * share : (rank + 1) * share]
        got = functional.broadcast(x, size - 1, world)
        yield ("broadcast", n), got + 0, everybodys[-1]
        got = functional.all_to_all_single(x, None, None, world)
        expected = torch.cat([e[rank * share : (rank + 1) * share] for e in everybodys])
        yield ("all_to_all", n), got + 0, expected
        got = functional.all_reduce_coalesced([x, 2 * x], "sum", world)
        yield ("all_reduce_coalesced", n), [g + 0 for g in got], [total, 2 * total]
        got = functional.all_gather_into_tensor_coalesced([x, x + 1], world)
        expected = [torch.cat(everybodys), torch.cat(everybodys) + 1]
        yield ("all_gather_coalesced", n), [g + 0 for g in got], expected
        got = functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], world)
        part = total[rank * share : (rank + 1) * share]
        yield ("reduce_scatter_coalesced", n), [g + 0 for g in got], [part, 2 * part]


def groups(rank: int, size: int):
    """Overlapping groups of some ranks; each group numbers its ranks from 0."""
    sets = [list(range(size)), list(range(0, size, 2)), list(range(size // 2, size)), [0]]
    made = [(ranks, dist.new_group(ranks)) for ranks in sets]
    for ranks, group in made:
        if rank not in ranks:
            continue
        for n in (3, 50_000):
            x = given(rank, n, torch.float32)
            dist.all_reduce(x, group=group)
            yield (
                ("all_reduce", ranks, n),
                x,
                combined([given(r, n, torch.float32) for r in ranks], "SUM"),
            )
            x = given(rank, n, torch.float32)
            dist.broadcast(x, ranks[-1], group=group)
            yield ("broadcast", ranks, n), x, given(ranks[-1], n, torch.float32)
            if len(ranks) > 1 and rank == ranks[-1]:
                dist.send(x, ranks[0], group=group)
            if len(ranks) > 1 and rank == ranks[0]:
                dist.recv(x.zero_(), ranks[-1], group=group)
                yield ("recv", ranks, n), x, given(ranks[-1], n, torch.float32)
    for ranks, group in made:
        if rank in ranks:
            dist.destroy_process_group(group)


def work_and_future(rank: int, size: int):
    for n in (3, 200_000):
        total = combined([given(r, n, torch.float32) for r in range(size)], "SUM")
        xs = [given(rank, n, torch.float32) for _ in range(5)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        for work in reversed(works):  # in any order
            work.wait()
            yield ("completed", n), (work.is_completed(), work.is_success()), (True, True)
        yield ("waited for", n), xs, [total] * 5
        x = given(rank, n, torch.float32)
        work = dist.all_reduce(x, async_op=True)
        then = work.get_future().then(lambda future: future.value()[0] * 2)
        yield ("future", n), then.wait(), total * 2
        yield ("result", n), work.result()[0].data_ptr(), x.data_ptr()
        x = given(rank, n, torch.float32)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        yield ("future of what is done", n), work.get_future().value()[0], total
        # As DDP's PowerSGD hook does: the callback of one collective calls the next one.
        x = given(rank, n, torch.float32)
        future = dist.all_reduce(x, async_op=True).get_future()

        def again(done):
            return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

        future = future.then(again).then(lambda done: done.value() + 1)
        expected = combined([total] * size, "SUM")
        yield ("future of a future", n), future.wait(), expected + 1
        if size > 1:
            gots = [torch.zeros(n), torch.zeros(n)]
            after, before = (rank + 1) % size, (rank - 1) % size
            coming = [dist.irecv(got, before, tag=i) for i, got in enumerate(gots)]
            going = [dist.isend(given(rank, n, torch.float32), after, tag=i) for i in (1, 0)]
            for work in (*coming, *going):
                work.wait()
                yield ("transfer completed", n), work.is_completed(), True
            yield ("transfers", n), gots, [given(before, n, torch.float32)] * 2
            got = torch.zeros(n)
            coming = dist.irecv(got, before)
            dist.isend(given(rank, n, torch.float32), after).wait()
            value = coming.get_future().wait()[0]
            yield ("transfer's future", n), value, given(before, n, torch.float32)


def in_a_row(rank: int, size: int):
    """Asynchronous operations on one tensor with gaps: each begins with the result of the last."""
    if size == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # no public name
    if rank == size - 1:
        store.wait([f"has called {r}" for r in range(size - 1)])  # so none of their calls has run
    x = torch.full((3, 4), float(rank + 1)).t()
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    works += [dist.broadcast(x, 0, async_op=True), dist.all_reduce(x, async_op=True)]
    store.set(f"has called {rank}", "")
    for work in works:
        work.wait()
    yield "four", x, torch.full((4, 3), size * (size + 1) / 2 * size * size)


def not_a_number(rank: int, size: int):
    """MIN and MAX return NaN where any rank has one."""
    for dtype, op in itertools.product(FLOATS, ("MIN", "MAX")):
        x = torch.ones(size + 1, dtype=dtype)
        x[rank] = torch.nan
        dist.all_reduce(x, reduce_op(op))
        yield (dtype, op), x.isnan().tolist(), [True] * size + [False]


def refusals(rank: int, size: int):
    """An unsupported call raises an error with its name on each rank; the group still works."""
    numbers, factor = torch.ones(3), dist._make_nccl_premul_sum(2.0)
    complex_numbers = torch.ones(3, dtype=torch.complex64)
    calls = {
        "BAND": lambda: dist.all_reduce(numbers, dist.ReduceOp.BAND),
        "AVG": lambda: dist.all_reduce(numbers.long(), dist.ReduceOp.AVG),
        "PREMUL_SUM": lambda: dist.all_reduce(numbers.long(), factor),
        # shm would multiply real and imaginary parts separately; torch checks all_reduce only.
        "PRODUCT": lambda: dist.reduce(complex_numbers, 0, dist.ReduceOp.PRODUCT),
        "MAX": lambda: dist.reduce_scatter(
            complex_numbers, [complex_numbers] * size, dist.ReduceOp.MAX
        ),
    }
    for name, call in calls.items():
        try:
            call()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        yield name, f"does not know ReduceOp.{name}" in message or message, True
    if size > 1:
        x = torch.ones(size + 1, size)
        for split in ([], [size + 2, -1] + [0] * (size - 2)):
            try:
                dist.all_to_all_single(x.clone(), x, split, split)
                message = "no error"
            except RuntimeError as error:
                message = str(error)
            yield ("rows", split), f"not be split among {size} ranks" in message or message, True
    dist.all_reduce(numbers)
    yield "lives on", numbers, torch.full((3,), float(size))


def profiles(rank: int, size: int):
    """The profiler of torch shows each operation with its name and the shapes of its inputs."""
    x, each = torch.zeros(3, 2), [torch.zeros(3, 2) for _ in range(size)]
    shape, shapes = [[3, 2]], [[3, 2]] * size
    calls = {
        "all_reduce": (shape, functools.partial(dist.all_reduce, x)),
        "reduce": (shape, functools.partial(dist.reduce, x, 0)),
        "broadcast": (shape, functools.partial(dist.broadcast, x, 0)),
        "all_gather": (shape, functools.partial(dist.all_gather, each, x)),
        "gather": (shape, functools.partial(dist.gather, x, each if rank == 0 else None)),
        "scatter": (
            shapes if rank == 0 else [],
            functools.partial(dist.scatter, x, each if rank == 0 else None),
        ),
        "reduce_scatter": (shapes, functools.partial(dist.reduce_scatter, x, each)),
        "all_to_all": (
            shapes,
            functools.partial(dist.all_to_all, list(map(torch.clone, each)), each),
        ),
        "barrier": ([], dist.barrier),
    }
    if rank == 0 and size > 1:
        calls["send"] = (shape, functools.partial(dist.send, x, 1))
    if rank == 1:
        calls["recvAnySource"] = (shape, functools.partial(dist.recv, x))
    for name, (expected, call) in calls.items():
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profiler:
            call()
        events = [e for e in profiler.events() if e.name.startswith("shm:")]
        seen = [(e.name, e.input_shapes, e.is_async) for e in events]
        yield name, str(seen), str([(f"shm:{name}", expected, True)])


OPERATIONS = (
    all_reduce,
    all_reduce_of_every_half,
    all_reduce_of_100_mb,
    written_past_the_caches,
    all_reduce_coalesced,
    all_reduce_of_sparse_tensors,
    reduce,
    broadcast,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    send_and_recv,
    barriers,
    objects,
    functional_collectives,
    groups,
    refusals,
    work_and_future,
    in_a_row,
    not_a_number,
    profiles,
)

if __name__ == "__main__":
    main()
