"""Model-check custom_backend/shm/rounds.h: try all orders in which its ranks can take steps.

The program of a rank is a list of steps. A step begins when the counters of all other ranks have
reached its value; then it reads slots, or writes one, and adds 1 to its own counter. The values
depend only on the rank's own steps, and only a rank itself writes its slots. So the number of steps
that each rank has done is the full state. Few states are reachable, and a search visits all.
"""

import itertools
import re
from dataclasses import dataclass

import pytest
from helpers import ROOT

LAYOUT = (ROOT / "custom_backend" / "shm" / "layout.h").read_text()
DEPTH = int(re.search(r"constexpr uint32_t kDepth = (\d+);", LAYOUT).group(1))
# (rounds, whether they have a "combine"); "together" is finish_together()
OPERATIONS = [*itertools.product((1, 2, 3, 4, 5), (False, True)), "together"]


@dataclass(frozen=True)
class Step:
    name: str  # write, combine, collect, together
    round: int  # numbered through all operations
    awaits: int  # the value that the counters of all other ranks must reach
    counter: int  # the rank's own counter after the step
    reads: str = ""  # the part of the other ranks' slots: written or combined


def program(operations, depth: int, too_early: int = 0) -> list[Step]:
    """Rounds::run for each operation, line by line. `too_early` plants a mistake."""
    steps, posted, first = [], 0, 0
    free_after, written, combined = [0] * depth, [0] * depth, [0] * depth
    for operation in operations:
        if operation == "together":
            posted += 1
            steps.append(Step("together", first, 0, posted))
            steps.append(Step("together", first, posted, posted))
            continue
        rounds, has_combine = operation
        lag = 2 if has_combine else 1
        for i in range(rounds + lag):
            if i < rounds:
                slot = (first + i) % depth
                posted += 1
                steps.append(Step("write", first + i, free_after[slot], posted))
                written[slot] = posted
            if has_combine and 1 <= i <= rounds:
                slot = (first + i - 1) % depth
                posted += 1
                steps.append(Step("combine", first + i - 1, written[slot], posted, "written"))
                combined[slot] = posted
            if i >= lag:
                slot = (first + i - lag) % depth
                ready, part = (combined, "combined") if has_combine else (written, "written")
                steps.append(Step("collect", first + i - lag, ready[slot], posted, part))
                free_after[slot] = posted + 1 - too_early
        first += rounds
    return steps


def contents(steps: list[Step], depth: int) -> list[dict]:
    """The content of a rank's slots after 0, 1, 2, ... of its steps: (slot, part) -> round."""
    now, all_times = {}, [{}]
    for step in steps:
        slot = step.round % depth
        if step.name == "write":  # overwrites all parts
            now = {**now, (slot, "written"): step.round, (slot, "combined"): None}
        if step.name == "combine":
            now = {**now, (slot, "combined"): step.round}
        all_times.append(now)
    return all_times


def explore(operations, ranks: int, depth: int = DEPTH, too_early: int = 0) -> tuple[set, int]:
    """The mistakes found, and the number of states."""
    steps = program(operations, depth, too_early)
    slots = contents(steps, depth)
    counters = [0, *(step.counter for step in steps)]
    wrong, seen, new = set(), {(0,) * ranks}, [(0,) * ranks]
    while new:
        state = new.pop()
        moves = []
        for rank, done in enumerate(state):
            if done == len(steps):
                continue
            step, others = steps[done], state[:rank] + state[rank + 1 :]
            if all(counters[other] >= step.awaits for other in others):
                moves.append((*state[:rank], done + 1, *state[rank + 1 :]))
                place = step.round % depth, step.reads
                if step.reads and any(slots[o].get(place) != step.round for o in others):
                    wrong.add("overwritten")
        if not moves and state != (len(steps),) * ranks:
            wrong.add("deadlock")
        fresh = [move for move in moves if move not in seen]
        seen.update(fresh)
        new += fresh
    return wrong, len(seen)


def sequences(length: int) -> list[tuple]:
    return list(itertools.product(OPERATIONS, repeat=length))


@pytest.mark.parametrize(("ranks", "length"), [(2, 3), (3, 2)])
def test_no_order_of_steps_goes_wrong(ranks, length):
    states = 0
    for operations in sequences(length):
        wrong, count = explore(operations, ranks)
        assert not wrong, operations
        states += count
    print(f"{ranks} ranks, {length} operations in a row: {states} states")
    assert states > 10_000


def test_many_short_operations():
    """The operations use each slot several times."""
    for operations in itertools.product([(1, False), (1, True)], repeat=9):
        assert not explore(operations, 2)[0]


def test_with_three_slots_ranks_would_wait_for_each_other():
    found = {operations: explore(operations, 2, depth=3)[0] for operations in sequences(2)}
    assert set().union(*found.values()) == {"deadlock"}
    for operations, wrong in found.items():
        # Only with combine, where ranks read one iteration later.
        long = any(operation != "together" and operation[1] for operation in operations)
        assert long or not wrong, operations
    assert found[(4, True), "together"] == {"deadlock"}


def test_a_slot_freed_one_step_too_early_would_be_overwritten():
    found = [explore(operations, 2, too_early=1)[0] for operations in sequences(2)]
    assert set().union(*found) == {"overwritten"}


def test_the_model_follows_the_source():
    """The model repeats these lines of rounds.h: change both together."""
    source = (ROOT / "custom_backend" / "shm" / "rounds.h").read_text()
    for line in (
        "constexpr uint32_t lag = has_combine ? 2 : 1;",
        "for (uint32_t i = 0; i < rounds + lag; ++i) {",
        "wait_for_all(free_after(i), operation);",
        "written(i) = post();",
        "if (i >= 1 && i - 1 < rounds) {",
        "wait_for_all(written(i - 1), operation);",
        "combined(i - 1) = post();",
        "wait_for_all(has_combine ? combined(k) : written(k), operation);",
        "free_after(k) = posted_ + 1;",
        "first_ += rounds;",
    ):
        assert source.count(line) == 1, line
