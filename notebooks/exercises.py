"""check(): is an exercise solved? In one line it says what is wrong, in the kernel or on ranks.

    check(right, answer, hints=["...", "..."])

right(answer) raises an AssertionError whose message says what is wrong; whatever else it raises
is told as well. The cell never fails, so that the rest of the page can be run.

Ranks that check an answer tell each other what they found over the store. A wrong answer may leave
ranks in a collective that never ends, and then the process group is broken. The store still works.
"""

import contextlib
import json
import signal
import threading
import time
from datetime import timedelta

SECONDS = 60  # the longest that an answer may take
store = None  # the ranks' TCPStore; start_ranks() sets it
start_again = False  # whether the last answer has left the ranks in a state that cannot be used

FINE, WRONG, WAITS, RAISES = range(4)  # what happened on a rank: the highest is told
_tries = {}  # name of the check -> wrong answers so far
_given = {}  # (name of the check, part of a message) -> hints given so far
_checks = 0  # how many there have been here,
_talks = 0  # and how often `right` has called on_all_ranks() in the last


def check(right, *answers, hints=()) -> None:
    """Print "not answered yet", "not yet: ..." or "correct".

    right: a function of the answers. It asserts; its name is the name of the exercise.
    answers: what the reader has set; None, for any of them, means not answered.
    hints: part of a message -> the hint, or hints, for the mistake that the message names. From the
    second wrong answer on, the first entry whose part occurs in the message adds its next hint.
    A list: hints for any mistake.

    In a %%px cell all ranks call it, and one line is printed for all of them: an exception on the
    first rank that raises one, or else what is wrong on the first rank on which something is.
    `right` runs only if all ranks have an answer. It must let every rank take part in its
    collectives.
    """
    global start_again, _checks, _talks
    import torch.distributed as dist  # not above: course.py comes before torch

    start_again = False
    _checks, _talks = _checks + 1, 0
    on_ranks = dist.is_initialized() and dist.get_world_size() > 1
    everywhere = on_all_ranks if on_ranks else lambda said, about: [said]
    answered = everywhere(all(answer is not None for answer in answers), "answered?")
    if all(answered):
        found = everywhere(_problem(right, answers), "what is wrong?")
        _, problem = max(found, key=lambda each: each[0])  # of equals, the first
        if on_ranks and problem:
            start_again = not all(everywhere(_group_works(), "does the group work?"))
        line = "correct"
        if problem:
            line = "not yet: " + problem + _hint(right.__name__, problem, hints)
    elif any(answered):
        line = f"not answered yet on rank {answered.index(False)}: every rank needs the answer"
    else:
        line = "not answered yet" + _open_ones(answers)
    if start_again:
        line += " (The ranks start again.)"
    if not on_ranks or dist.get_rank() == 0:
        print(line)


def _open_ones(answers) -> str:
    """The missing answers, if some are there."""
    missing = [f"answer {i}" for i, answer in enumerate(answers, 1) if answer is None]
    return f" (missing: {', '.join(missing)})" if len(missing) < len(answers) else ""


def _hint(name: str, problem: str, hints) -> str:
    """The next hint about this mistake, in brackets; "" at the first wrong answer."""
    _tries[name] = _tries.get(name, 0) + 1
    hints = hints if isinstance(hints, dict) else {"": hints}
    part = next((part for part in hints if part in problem and hints[part]), None)
    if part is None or _tries[name] == 1:
        return ""
    texts = [hints[part]] if isinstance(hints[part], str) else hints[part]
    number = _given.get((name, part), 0)
    _given[name, part] = number + 1
    return f" (Hint: {texts[min(number, len(texts) - 1)]})"


def _problem(right, answers) -> tuple[int, str]:
    """How much it tells, and what is wrong."""
    try:
        with _limit(SECONDS):
            right(*answers)
    except AssertionError as wrong:
        return WRONG, (_line(str(wrong)) or "wrong")[:300]
    except _TooLong:
        return RAISES, f"no end within {SECONDS:g} seconds"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the reader's own function, which may also call exit()
        text = _line(f"it raises {type(error).__name__}: {error}")
        if "DistStoreError" in text:
            return WAITS, "it waits for a key in the store that no rank sets"
        if "is not connected" in text:
            return WAITS, "a rank sends to itself (Gloo cannot), or to a rank that is gone"
        if "gloo" in text:
            return WAITS, "a rank waits for another one: do all ranks make the same calls?"
        if isinstance(error, TypeError | AttributeError) and not any(map(callable, answers)):
            text = _line(f"is that of the kind that was asked for? {error}")
        return RAISES, text[:300]
    return FINE, ""


def _line(text: str) -> str:
    """The first line, with the second if the first ends in a colon, as in errors of RPC."""
    first, _, rest = text.partition("\n")
    return f"{first} {rest.splitlines()[0]}" if rest and first.endswith(":") else first


class _TooLong(BaseException):  # not an Exception: an answer might catch that
    pass


@contextlib.contextmanager
def _limit(seconds: float):
    """Raise _TooLong in this thread after `seconds`, unless it waits in C++.

    The process group and the store have time limits of their own.
    """
    if threading.current_thread() is not threading.main_thread():  # signals do not come here
        yield
        return

    def too_long(*_):
        raise _TooLong

    handler = signal.signal(signal.SIGALRM, too_long)
    before = signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # and again, if an answer caught it
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def on_all_ranks(said, about: str = "") -> list:
    """What every rank says (anything for JSON), in rank order.

    It goes over the store, so that it works when the process group is broken. All ranks call it.
    """
    import torch.distributed as dist

    global _talks
    _talks += 1
    question = f"check {_checks}: {about or _talks}"  # about: where a rank may have left `right`
    keys = [f"{question} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], json.dumps(said))
    until = time.monotonic() + SECONDS + 60  # a collective takes 20 to fail
    while not store.check(keys):  # not wait(): it would keep other threads from the store
        if time.monotonic() > until:
            raise TimeoutError("a rank does not come to the check: call start_ranks()")
        time.sleep(0.01)
    return [json.loads(store.get(key)) for key in keys]


def _group_works() -> bool:
    """Whether the ranks can still make a group, and use the default one."""
    import torch.distributed as dist

    try:
        group = dist.new_group(timeout=timedelta(seconds=10))
        dist.barrier(group)
        dist.destroy_process_group(group)
        dist.barrier()
    except RuntimeError:
        return False
    return True
