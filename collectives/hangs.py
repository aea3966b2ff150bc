"""A gallery of planted failures: how each looks, how it is diagnosed. Each ends within seconds.

    torchrun --standalone --nproc_per_node=3 collectives/hangs.py
    torchrun --standalone --nproc_per_node=2 collectives/hangs.py --case shapes
    torchrun --standalone --nproc_per_node=4 collectives/hangs.py --case slow --timeout 3

    skipped        the last rank skips a collective
    shapes         it reduces a tensor of another shape, with as many numbers
    sizes          it reduces a tensor of another size
    operations     it calls another collective than the others do
    rank0-barrier  rank 0 alone enters a barrier, inside `if rank == 0:`
    slow           the last rank is alive, but late
    dead           the last rank is killed

In the tables, look at *who* gets an error: mostly the ranks that did nothing wrong, and the text
does not name the guilty one. The line below each table is a tool that does. Lines that begin with
"[rank" are Gloo's own log. By default a job waits for 30 minutes (10 with NCCL) before it says
anything: always pass `timeout=`.
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
            raise UserError("a hang needs somebody to wait for: start 2 or more ranks by torchrun")
        tell(worker, f"Planted failures, each in a Gloo group with a time-out of {args.timeout} s")
        for name in CASES if args.case == "all" else [args.case]:
            CASES[name](worker, args.timeout)
            dist.barrier()  # the default group is unharmed: start the next case together
        tell(worker, NCCL_HAS_MORE)


def group_for(seconds: float, debug: str = "OFF"):
    """A new group: after an error a group is dead, and its ranks do not agree on what came last.

    Gloo on GPU machines too. NCCL raises nothing here: its watchdog ends the whole process.
    debug: "DETAIL" is what TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment does for all groups:
    before each collective, the ranks compare what they are about to call. It counts when the group
    is made. It is slow, and DistributedDataParallel crashes with such a group: for debugging only.
    """
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    finally:
        dist.set_debug_level(before)


def outcome(call: Callable) -> tuple[str, float]:
    """Call: the result or the error as one short line, and the seconds it took."""
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
    guilty, group = worker.world_size - 1, group_for(seconds)
    did, seen = "skips it", ("nothing", 0.0)
    if worker.rank != guilty:
        did, seen = "all_reduce", outcome(lambda: dist.all_reduce(torch.ones(2), group=group))
    report(worker, "skipped: one rank does not come", did, seen)

    # The tool: a monitored_barrier before the suspect call. Rank 0 waits for a sign of each rank.
    # wait_all_ranks=True lists all who are missing; by default it stops at the first.
    group, named = group_for(seconds), ("", 0.0)
    if worker.rank != guilty:
        half = timedelta(seconds=seconds / 2)
        named = outcome(lambda: dist.monitored_barrier(group, half, wait_all_ranks=True))
    tell(worker, f"monitored_barrier before it says: {named[0]}")


def shapes(worker: Worker, seconds: float) -> None:
    """All ranks call all_reduce, one with another shape: a transposed weight, another reshape."""
    odd = worker.rank == worker.world_size - 1

    def reduce_in(group):
        x = (torch.arange(6.0) + 1).view((3, 2) if odd else (2, 3))
        dist.all_reduce(x, group=group)
        return x.tolist()

    did = f"all_reduce {[3, 2] if odd else [2, 3]}"
    seen = outcome(lambda: reduce_in(group_for(seconds)))
    report(worker, "shapes: as many numbers, arranged differently", did, seen)
    named = outcome(lambda: reduce_in(group_for(seconds, "DETAIL")))
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {named[0]}")


def sizes(worker: Worker, seconds: float) -> None:
    """All ranks call all_reduce, one with fewer numbers: the last batch, a layer of another size.

    Gloo ends a process that receives more than it has room for. (Where nobody does, a rank returns
    wrong numbers, and the others wait.)
    """
    odd = worker.rank == worker.world_size - 1
    did = f"all_reduce {2 if odd else 1000}"
    seen, status, log = in_a_child("sizes", did, seconds)
    log = (re.findall(r"op\.preamble\S* <= \S+ \d+ vs \d+", log) or ["nothing"])[0]
    report(worker, "sizes: one rank has fewer numbers", did, seen, exit_status=status, log=log)
    group, x = group_for(seconds, "DETAIL"), torch.ones(2 if odd else 1000)
    named = outcome(lambda: dist.all_reduce(x, group=group))
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {named[0]}")


def operations(worker: Worker, seconds: float) -> None:
    """The ranks agree on the moment but not on the collective: an `if` that differs by rank."""
    odd, x = worker.rank == worker.world_size - 1, torch.ones(2)

    def call(group):
        if odd:
            dist.broadcast(x, src=0, group=group)
        else:
            dist.all_reduce(x, group=group)

    group, did = group_for(seconds), "broadcast" if odd else "all_reduce"
    report(worker, "operations: one rank calls another one", did, outcome(lambda: call(group)))
    group = group_for(seconds, "DETAIL")
    tell(worker, f"TORCH_DISTRIBUTED_DEBUG=DETAIL says: {outcome(lambda: call(group))[0]}")


def rank0_barrier(worker: Worker, seconds: float) -> None:
    """Rank 0 alone enters a barrier: "rank 0 writes the file, then all wait", wrongly nested."""
    group = group_for(seconds)

    def program():
        if worker.rank == 0:
            dist.barrier(group)  # the bug: this line belongs outside of the `if`
        dist.all_reduce(torch.ones(2), group=group)

    # The tool: faulthandler writes the stack of a rank while it hangs. From outside of the process,
    # py-spy does: `py-spy dump --pid PID` for each rank.
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(seconds / 2, file=stack)
        seen = outcome(program)
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        number = re.search(r"line (\d+) in program", stack.read())
    line = Path(__file__).read_text().splitlines()[int(number[1]) - 1] if number else "not stuck"
    where = line.partition("#")[0].strip()
    report(worker, "rank0-barrier: a barrier inside `if rank == 0:`", where, seen)
    tell(worker, "the stacks say (column 'did'): rank 0 waits at another line than the others")


def slow(worker: Worker, seconds: float) -> None:
    """The last rank comes, but late: a slow disk, a shared processor, one long sample."""
    late, group = worker.rank == worker.world_size - 1, group_for(seconds)
    # The tool: a heartbeat. Each step of the work leaves a sign where the others can see it.
    beats = dist.PrefixStore("beats", next(dist.rendezvous("env://"))[0])
    beats.add("count", 0)
    dist.barrier()  # start together
    started, signs, seen = time.perf_counter(), "", ("nothing", 0.0)
    if late:
        while time.perf_counter() - started < seconds + 0.6:
            time.sleep(0.1)  # its work
            beats.add("count", 1)
    else:
        seen = outcome(lambda: dist.all_reduce(torch.ones(2), group=group))
        first = beats.add("count", 0)
        time.sleep(0.3)
        signs = f"{first}, then {beats.add('count', 0)}"
    waiting = time.perf_counter()
    dist.barrier()  # in a group that waits for longer
    waited = f"{time.perf_counter() - waiting:.1f}"
    did = f"comes {seconds + 0.6:g} s late" if late else "all_reduce"
    more = {"heartbeats": signs, "then waits in a barrier s": waited}
    report(worker, "slow: one rank is late", did, seen, **more)
    tell(worker, "the heartbeat says: it moves on, so it is slow and not stuck. A longer time-out")
    tell(worker, "lets the job live; the rank that never waits for the others is the slow one.")


def dead(worker: Worker, seconds: float) -> None:
    """The last rank is killed, as the system does to the largest process when memory runs out."""
    guilty = worker.world_size - 1
    part = "is killed" if worker.rank == guilty else "all_reduce 1000"
    seen, status, _ = in_a_child("dead", part, seconds)
    report(worker, "dead: one rank is killed in the middle", part, seen, exit_status=status)
    tell(worker, f"the exit status says: rank {guilty}. torchrun's last lines name the first rank")
    tell(worker, "that failed, and its signal. SIGKILL comes from outside: look at the memory.")


def in_a_child(case: str, part: str, seconds: float) -> tuple[tuple[str, float], str, str]:
    """Play this rank's part in a child process, because torchrun ends the whole job with one rank.

    Returns what the child saw, how it ended, and what it wrote to standard error.
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
            seen = ("", 0.0)  # it ended before it could say anything
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
    time.sleep(0.2)  # so that nobody's error is only that we have left
    os._exit(0)  # the group is broken: leave without taking leave


ALL = (skipped, shapes, sizes, operations, rank0_barrier, slow, dead)
CASES = {case.__name__.replace("_", "-"): case for case in ALL}

NCCL_HAS_MORE = """
NCCL has more: a watchdog thread that notices a time-out, names the collective and the group, and
ends the process; and the flight recorder (TORCH_FR_BUFFER_SIZE), which keeps each rank's last
collectives for `torchfrtrace` to compare. Gloo has no watchdog: the call itself raises. And
monitored_barrier is Gloo's alone: with NCCL, make a Gloo group beside it."""


def parse_args():
    parser = ArgumentParser(description="Planted hangs and what tells them apart.")
    parser.add_argument("--case", choices=("all", *CASES), default="all", help="fault to plant")
    parser.add_argument(
        "--timeout", type=between(0.5, 60), default=1.5, help="of each case's group, in s"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
