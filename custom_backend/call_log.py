"""Log the calls of this rank for counting_backend.py, and report those of all ranks."""

import json
import os
import sys
import threading
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from call_report import print_report, write_timeline

OURS = ("call_log.py", "call_report.py", "counting_backend.py", "run_script.py")
# Files that are not callers. (A script may lie next to this file.)
HIDDEN = (
    f"{Path(torch.__file__).parent}/",
    *(str(Path(__file__).with_name(name)) for name in OURS),
)
TIMELINE = 100_000  # calls per rank; later calls are in the table only
PATIENCE = timedelta(seconds=60)  # how long rank 0 waits for late ranks
ROUNDS = 10  # how often a rank asks rank 0 for the time


@dataclass
class Call:
    operation: str
    name: str  # the group, and the number of the operation in it
    caller: str
    row: "Row"
    begun: float
    returned: float = 0.0
    done: float = 0.0
    given: int = 0
    got: int = 0
    waits: list = field(default_factory=list)


@dataclass
class Row:
    """The sum of all calls of one operation from one line of the script."""

    calls: int = 0
    given: int = 0  # bytes of the tensors that the rank passed in
    got: int = 0  # bytes of the tensors with the result
    in_call: float = 0.0  # seconds until the call returned
    in_wait: float = 0.0  # seconds in wait()
    until_done: float = 0.0  # seconds from the call to the moment when the operation was complete


class CallLog:
    def __init__(self):
        self.rows: dict[tuple[str, str], Row] = defaultdict(Row)
        self.timeline: list[Call] = []
        self.store, self.rank, self.size = None, 0, 1
        self.offset = 0.0  # add it to this clock to get the clock of rank 0, in seconds
        self.folder = None
        self.lock = threading.Lock()  # threads of Gloo report completed operations

    clock = staticmethod(time.perf_counter)

    def join(self, store: dist.Store, rank: int, size: int) -> None:
        """Called for each group. The first group is the whole job; its ranks share one report."""
        if self.store is not None:
            return
        self.store, self.rank, self.size = dist.PrefixStore("counting", store), rank, size
        self.folder = os.environ.get("COUNT_TRACE")
        if self.folder:
            self.offset = offset_of_rank_0(self.store, rank, size)

    def begin(self, operation: str, name: str) -> Call:
        caller = calling_line()
        return Call(operation, name, caller, self.rows[operation, caller], self.clock())

    def launched(self, call: Call, arguments: list, given, got, work) -> None:
        """The call has returned; `given` and `got` say which arguments hold the tensors."""
        call.returned = self.clock()
        call.given, call.got = bytes_of(arguments, given), bytes_of(arguments, got)
        with self.lock:
            call.row.calls += 1
            call.row.given += call.given
            call.row.got += call.got
            call.row.in_call += call.returned - call.begun
        if self.folder and len(self.timeline) < TIMELINE:
            self.timeline.append(call)
        if work is None:
            self.completed(call)
            return
        try:
            future = work.get_future()
        except RuntimeError:
            return  # send and recv of Gloo have no future: complete when wait() returns
        # On a GPU this runs when the operation is in the stream: see counting.md.
        future.add_done_callback(lambda _: self.completed(call))

    def waited(self, call: Call, started: float) -> None:
        ended = self.clock()
        with self.lock:
            call.row.in_wait += ended - started
        call.waits.append((started, ended))
        if not call.done:
            self.completed(call)

    def completed(self, call: Call) -> None:
        with self.lock:
            if not call.done:
                call.done = self.clock()
                call.row.until_done += call.done - call.begun

    def report(self) -> None:
        """Rank 0 prints the table of all ranks and writes the timeline. All ranks call it once.

        After an exception it does nothing: other ranks may never call it.
        """
        if self.store is None or hasattr(sys, "last_value"):
            return
        mine = {
            "rows": [[*key, *vars(row).values()] for key, row in self.rows.items()],
            "timeline": [self.event(call) for call in self.timeline],
        }
        store, self.store = self.store, None
        store.set(f"report/{self.rank}", zlib.compress(json.dumps(mine).encode()))
        if self.rank > 0:
            return
        keys = {rank: f"report/{rank}" for rank in range(self.size)}
        try:
            store.wait(list(keys.values()), PATIENCE)
        except dist.DistStoreError:
            late = [rank for rank, key in keys.items() if not store.check([key])]
            names = ", ".join(map(str, late))
            print(f"not counted: rank(s) {names}, which did not come to the end")
            keys = {rank: key for rank, key in keys.items() if rank not in late}
        found = {r: json.loads(zlib.decompress(store.get(key))) for r, key in keys.items()}
        print_report({rank: calls["rows"] for rank, calls in found.items()})
        if self.folder:
            timelines = {rank: calls["timeline"] for rank, calls in found.items()}
            path = write_timeline(Path(self.folder), timelines)
            print(f"\n{path}: open it in https://ui.perfetto.dev")
            if len(self.timeline) == TIMELINE:
                print(f"It has the first {TIMELINE} calls only.")

    def event(self, call: Call) -> dict:
        def here(moment: float) -> float:
            return moment + self.offset

        return {
            "operation": call.operation,
            "name": call.name,
            "caller": call.caller,
            "given": call.given,
            "got": call.got,
            "call": [here(call.begun), here(call.returned)],
            "waits": [[here(a), here(b)] for a, b in call.waits],
            "done": here(call.done) if call.done else None,
        }


def calling_line() -> str:
    """ "train.py:57 train_step": the innermost line on the stack outside of torch."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(HIDDEN):
        frame = frame.f_back
    if frame is None:
        return "a thread of torch"  # on GPUs, backward runs in its own threads
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def bytes_of(arguments: list, which: int | None) -> int:
    if which is None or which >= len(arguments):
        return 0
    return total_bytes(arguments[which])


def total_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, list | tuple):
        return sum(map(total_bytes, tensors))
    return 0


def offset_of_rank_0(store: dist.Store, rank: int, size: int) -> float:
    """Seconds to add to the clock of this rank to get the clock of rank 0, on any machine.

    Each rank asks rank 0 for the time ROUNDS times. The fastest answer counts, as the time halfway
    between question and answer. Its error is at most half of that round trip.
    """
    answers = []
    for other in range(1, size):
        for turn in range(ROUNDS):
            question, answer = f"time/{other}/{turn}", f"time/{other}/{turn}/is"
            if rank == other:
                asked = CallLog.clock()
                store.set(question, "?")
                theirs = float(store.get(answer))
                answered = CallLog.clock()
                answers.append((answered - asked, theirs - (asked + answered) / 2))
            elif rank == 0:
                store.get(question)  # waits for it
                store.set(answer, repr(CallLog.clock()))
    return min(answers)[1] if answers else 0.0
