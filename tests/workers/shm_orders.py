"""Legal programs that must end: two ranks call operations in different orders."""

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "custom_backend"))

import shm  # noqa: F401
import torch
import torch.distributed as dist

MB_10 = 10 * 2**20 // 4


def main() -> None:
    dist.init_process_group("shm", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    for program in PROGRAMS:
        begin = time.perf_counter()
        program(rank, 1 - rank)
        dist.barrier()
        if rank == 0:
            print(f"{program.__name__}: {1000 * (time.perf_counter() - begin):.0f} ms")
    dist.destroy_process_group()


def ones(n: int = 100_000) -> torch.Tensor:
    return torch.ones(n)


def all_reduce_then_send_against_recv_then_all_reduce(rank: int, other: int) -> None:
    x, message = ones(), ones()
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(message, other)
        work.wait()
    else:
        dist.recv(message.zero_(), other)
        dist.all_reduce(x)
    assert x.eq(2).all()
    assert message.eq(1).all()


def both_send_much_before_they_receive(rank: int, other: int) -> None:
    message = torch.zeros(MB_10)
    going = dist.isend(ones(MB_10), other)
    coming = dist.irecv(message, other)
    for work in (going, coming):
        work.wait()
    assert message.eq(1).all()


def two_groups_waited_for_in_opposite_order(rank: int, other: int) -> None:
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensors = ones(), ones()
    calls = list(zip(tensors, groups, strict=True))
    if rank == 1:
        calls.reverse()  # different groups need no common order
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in calls]
    for work in works:
        work.wait()
    assert all(x.eq(2).all() for x in tensors)
    for group in groups:
        dist.destroy_process_group(group)


def a_large_message_arrives_during_an_all_reduce(rank: int, other: int) -> None:
    x, message = ones(), ones(MB_10)
    if rank == 0:
        dist.send(message, other)
        dist.all_reduce(x)
    else:
        coming = dist.irecv(message.zero_(), other)
        time.sleep(0.05)  # its first packets have arrived
        dist.all_reduce(x)
        coming.wait()
    assert x.eq(2).all()
    assert message.eq(1).all()


def a_large_message_leaves_during_an_all_reduce(rank: int, other: int) -> None:
    x, message = ones(), ones(MB_10)
    if rank == 0:
        going = dist.isend(message, other)
        dist.all_reduce(x)
        going.wait()
    else:
        dist.recv(message.zero_(), other)
        dist.all_reduce(x)
    assert x.eq(2).all()
    assert message.eq(1).all()


def polling(rank: int, other: int) -> None:
    """Neither rank waits; both only poll is_completed()."""
    x, message = ones(), torch.zeros(MB_10)
    works = [dist.isend(ones(MB_10), other), dist.irecv(message, other)]
    works.append(dist.all_reduce(x, async_op=True))
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    assert x.eq(2).all()
    assert message.eq(1).all()


def a_future_calls_the_next_operation(rank: int, other: int) -> None:
    """Synchronous, or async and waited for; any thread may run the first one."""
    for waits in (False, True):
        x = ones()

        def at_once(future):
            dist.all_reduce(future.value()[0])

        def later(future):
            dist.all_reduce(future.value()[0], async_op=True).get_future().wait()

        work = dist.all_reduce(x, async_op=True)
        then = work.get_future().then(at_once).then(lambda _, w=work: later(w.get_future()))
        if waits:
            work.wait()
        then.wait()
        assert x.eq(8).all()


PROGRAMS = (
    all_reduce_then_send_against_recv_then_all_reduce,
    both_send_much_before_they_receive,
    two_groups_waited_for_in_opposite_order,
    a_large_message_arrives_during_an_all_reduce,
    a_large_message_leaves_during_an_all_reduce,
    polling,
    a_future_calls_the_next_operation,
)

if __name__ == "__main__":
    main()
