"""Hangs and timeouts of collectives: seven planted failures, and how to find the cause of each.

    torchrun --standalone --nproc_per_node=3 collectives/hangs.py
    torchrun --standalone --nproc_per_node=2 collectives/hangs.py --case shapes
    torchrun --standalone --nproc_per_node=4 collectives/hangs.py --case slow --timeout 3

    skipped        the last rank skips a collective
    shapes         the last rank reduces a tensor of another shape with as many elements
    sizes          the last rank reduces a tensor with fewer elements
    operations     the last rank calls another collective than the other ranks
    rank0-barrier  rank 0 alone enters a barrier, inside `if rank == 0:`
    slow           the last rank is alive, but late
    dead           the last rank is killed

Each ends within seconds. In the tables, look at *which* ranks get an error: mostly those that did
nothing wrong, and the message does not name the rank at fault. The line below each table shows a
tool that does. Lines that begin with "[rank" are Gloo's own log. By default a job waits for 30
minutes (10 with backend nccl) before it reports anything: always pass `timeout=`.
"""

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, between
from runtime import Worker, distributed_worker
from tables import print_by_rank
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if worker.world_size < 2:
            raise UserError("a hang needs a rank to wait for: start 2 or more ranks by torchrun")
        tell(worker, f"Planted failures, each in a Gloo group with a timeout of {args.timeout} s")
        for name in CASES if args.case == "all" else [args.case]:
            CASES[name](worker, args.timeout)
            dist.barrier()  # the default group still works: start the next case together
        tell(worker, NCCL_HAS_MORE)


def group_for(seconds: float, debug: str = "OFF"):
    """Make a new group: after an error the old one cannot be used, and its ranks are out of step.

    Always Gloo, also on GPU machines: NCCL raises nothing here, its watchdog ends the process.
    debug: "DETAIL" does for this group what TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment does
    for all groups: before each collective, the ranks compare their calls. The level is read when
    the group is made. DETAIL is slow, and DistributedDataParallel crashes with such a group.
    """
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    finally:
        dist.set_debug_level(before)


def outcome(call: Callable) -> tuple[str, float]:
    """Run `call`: its result or its error as one short line, and the seconds it took."""
    started = time.perf_counter()
    try:
        text = f"no error: {call()}".removesuffix(": None")
    except RuntimeError as error:
        text = shorten(str(error))
    return text, time.perf_counter() - started


def shorten(message: str) -> str:
    """The message without Gloo's file names, advice, addresses, and C++ stack."""
    message = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ", "", message.splitlines()[0])
    message = re.sub(
        r"CollectiveFingerPrint\(.*?OpType=(\w+)(?:, TensorShape=(\[[^\]]*\]))?.*?"
        r"(?=, but Rank|\.?Collectives differ|$)",
        lambda match: " ".join(filter(None, match.groups())),
        message,
    )
    return re.split(r"\. This may indicate| \[[\d.:a-f]+\]:\d+|\.?Collectives differ", message)[0]


def report(worker: Worker, title: str, did: str, seen: tuple[str, float], **more) -> None:
    print_by_rank(worker, title, did=did, saw=seen[0], after_s=f"{seen[1]:.1f}", **more)


def tell(worker: Worker, text: str) -> None:
    if worker.is_main:
        print(text, flush=True)


def skipped(worker: Worker, seconds: float) -> None:
    """The last rank skips a collective: a `continue` on a bad batch, an early `return`."""
    faulty, group = worker.world_size - 1, group_for(seconds)
    did, seen = "skips it", ("nothing", 0.0)
    if worker.rank != faulty:
        did, seen = "all_reduce", outcome(lambda: dist.all_reduce(torch.ones(2), group=group))
    report(worker, "skipped: one rank skips the collective", did, seen)

    # The tool: a monitored_barrier before the suspect call. Rank 0 waits for a message from each
    # rank. wait_all_ranks=True lists all missing ranks; by default it stops at the first one.
    group, named = group_for(seconds), ("", 0.0)
    if worker.rank != faulty:
        half = timedelta(seconds=seconds / 2)
        named = outcome(lambda: dist.monitored_barrier(group, half, wait_all_ranks=True))
    tell(worker, f"monitored_barrier before the all_reduce says: {named[0]}")


def shapes(worker: Worker, seconds: float) -> None:
    """All ranks call all_reduce, one with another shape: a transposed weight, another reshape."""
    odd = worker.rank == worker.world_size - 1

    def reduce_in(group):
        x = (torch.arange(6.0) + 1).view((3, 2) if odd else (2, 3))
        dist.all_reduce(x, group=group)
        return x.tolist()

    did = f"all_reduce {[3, 2] if odd else [2, 3]}"
    seen = outcome(lambda: reduce_in(group_for(seconds)))
    report(worker, "shapes: as many elements, in another shape", did, seen)
    named = outcome(lambda: reduce_in(group_for(seconds, "DETAIL")))
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {named[0]}")


def sizes(worker: Worker, seconds: float) -> None:
    """All ranks call all_reduce, one with fewer elements: the last batch, a smaller layer.

    Gloo ends a process that receives more than its buffer holds. (If no process does, one rank
    returns wrong numbers, and the other ranks wait.)
    """
    odd = worker.rank == worker.world_size - 1
    did = f"all_reduce {2 if odd else 1000}"
    seen, status, log = in_a_child("sizes", did, seconds)
    log = (re.findall(r"op\.preamble\S* <= \S+ \d+ vs \d+", log) or ["nothing"])[0]
    report(worker, "sizes: one rank has fewer elements", did, seen, exit_status=status, log=log)
    group, x = group_for(seconds, "DETAIL"), torch.ones(2 if odd else 1000)
    named = outcome(lambda: dist.all_reduce(x, group=group))
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {named[0]}")


def operations(worker: Worker, seconds: float) -> None:
    """One rank calls another collective at this point: an `if` that differs by rank."""
    odd, x = worker.rank == worker.world_size - 1, torch.ones(2)

    def call(group):
        if odd:
            dist.broadcast(x, src=0, group=group)
        else:
            dist.all_reduce(x, group=group)

    group, did = group_for(seconds), "broadcast" if odd else "all_reduce"
    report(
        worker, "operations: one rank calls another collective", did, outcome(lambda: call(group))
    )
    group = group_for(seconds, "DETAIL")
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {outcome(lambda: call(group))[0]}")


def rank0_barrier(worker: Worker, seconds: float) -> None:
    """Rank 0 alone enters a barrier: "rank 0 writes a file, then all ranks wait", but nested."""
    group = group_for(seconds)

    def program():
        if worker.rank == 0:
            dist.barrier(group)  # the bug: this line belongs outside of the `if`
        dist.all_reduce(torch.ones(2), group=group)

    # The tool: faulthandler writes the stack of a rank while it hangs. From outside the process,
    # py-spy does this: `py-spy dump --pid PID` for each rank.
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(seconds / 2, file=stack)
        seen = outcome(program)
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        number = re.search(r"line (\d+) in program", stack.read())
    line = Path(__file__).read_text().splitlines()[int(number[1]) - 1] if number else "not stuck"
    where = line.partition("#")[0].strip()
    report(worker, "rank0-barrier: a barrier inside `if rank == 0:`", where, seen)
    tell(worker, "the stacks say (column 'did'): rank 0 waits at another line than all other ranks")


def slow(worker: Worker, seconds: float) -> None:
    """The last rank comes, but late: a slow disk, a shared processor, one long sample."""
    late, group = worker.rank == worker.world_size - 1, group_for(seconds)
    # The tool: a heartbeat. Each step of the work adds 1 to a counter that every rank can read.
    beats = dist.PrefixStore("beats", next(dist.rendezvous("env://"))[0])
    beats.add("count", 0)
    dist.barrier()  # start together
    started, signs, seen = time.perf_counter(), "", ("nothing", 0.0)
    if late:
        while time.perf_counter() - started < seconds + 2:
            time.sleep(0.1)  # its work
            beats.add("count", 1)
    else:
        seen = outcome(lambda: dist.all_reduce(torch.ones(2), group=group))
        first = beats.add("count", 0)
        time.sleep(0.3)
        signs = f"{first}, then {beats.add('count', 0)}"
    waiting = time.perf_counter()
    dist.barrier()  # in the default group, whose timeout is longer
    waited = f"{time.perf_counter() - waiting:.1f}"
    did = f"comes {seconds + 2:g} s late" if late else "all_reduce"
    more = {"heartbeats": signs, "then waits in a barrier s": waited}
    report(worker, "slow: one rank is late", did, seen, **more)
    tell(worker, "the heartbeat says: the count still grows, so the rank is slow, not stuck.")
    tell(worker, "With a longer timeout the job goes on. The rank that never waits is slow.")


def dead(worker: Worker, seconds: float) -> None:
    """The last rank is killed, as the system does to the largest process when memory runs out."""
    faulty = worker.world_size - 1
    part = "is killed" if worker.rank == faulty else "all_reduce 1000"
    seen, status, _ = in_a_child("dead", part, seconds)
    report(worker, "dead: one rank is killed", part, seen, exit_status=status)
    tell(worker, f"the exit status says: rank {faulty}. torchrun's last lines name the first rank")
    tell(worker, "that failed, and its signal. SIGKILL comes from outside: look at the memory.")


def in_a_child(case: str, part: str, seconds: float) -> tuple[tuple[str, float], str, str]:
    """Run this rank's part in a child process, because torchrun ends the job if one rank dies.

    Returns what the child saw, its exit status, and what it wrote to standard error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.NamedTemporaryFile("r") as log:
        child = context.Process(target=run_part, args=(case, part, seconds, log.name, theirs))
        child.daemon = True  # it must not outlive us
        child.start()
        theirs.close()  # so that reading ends when the child does
        try:
            seen = ours.recv()
        except EOFError:
            seen = ("", 0.0)  # the child ended before it could send anything
        child.join()
        code = child.exitcode
        return seen, signal.Signals(-code).name if code < 0 else str(code), log.read()


def run_part(case: str, part: str, seconds: float, log: str, pipe) -> None:
    os.dup2(os.open(log, os.O_WRONLY), 2)  # also what C++ writes
    store, rank, world_size = next(dist.rendezvous("env://"))  # torchrun's store, as in the parent
    store = dist.PrefixStore(f"children of {case}", store)  # a store of their own
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = group_for(seconds)
    dist.barrier()
    if part == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(int(part.split()[-1]))
    pipe.send(outcome(lambda: dist.all_reduce(x, group=group)))
    pipe.close()
    time.sleep(0.2)  # or this exit could be the only error that another rank sees
    os._exit(0)  # the group is broken: skip destroy_process_group


ALL = (skipped, shapes, sizes, operations, rank0_barrier, slow, dead)
CASES = {case.__name__.replace("_", "-"): case for case in ALL}

NCCL_HAS_MORE = """
NCCL has more: a watchdog thread that notices a timeout and ends the process (before torch 2.15 it
names the collective and the group) and writes the flight recorder's file: each rank's last
collectives, for `torchfrtrace` to compare. With Gloo the call itself raises; it records, too, but
your program writes the file (clusters/flight_recorder.py). Only Gloo has
monitored_barrier: with NCCL, make a second group with Gloo (or, since torch 2.15, one group with
cpu:gloo,cuda:nccl)."""


def parse_args():
    parser = ArgumentParser(description="Planted hangs, and how to find the cause of each.")
    parser.add_argument("--case", choices=("all", *CASES), default="all", help="failure to plant")
    parser.add_argument(
        "--timeout", type=between(0.5, 60), default=1.5, help="timeout of each group, in seconds"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
