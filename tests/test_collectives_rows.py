"""collectives/: each row of "What usually goes wrong" is provoked in its script, then fixed."""

import re

import pytest
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "two ranks that first send": "test_collectives_algorithms.py::test_all_stuck_or_all_served",
    "every later call fails": "test_a_group_is_beyond_use_after_a_timeout",
    "old numbers at its end": "test_a_buffer_must_have_the_length_of_the_message",
    "not those at the time of `isend`": "test_a_tensor_that_is_changed_before_wait",
    "`invalid tensor size`": "test_collectives_operations.py::test_collectives_script",
    "after `reduce`": "test_reduce_leaves_half_sums",
    "the wrong rank sends": "test_src_counts_over_the_whole_job",
    "`new_group` hangs": (
        "test_collectives_groups.py::test_process_groups_prints",
        "test_groups_made_in_another_order",
    ),
    "lose updates": "test_collectives_groups.py::test_stores_prints",
    "a second `init_process_group`": "test_a_second_group_without_a_prefix",
    "a gradient is wrong": "test_collectives_operations.py::test_autograd_collectives_script",
    "in the last bit": "test_collectives_operations.py::test_reduce_ops_script",
    "a step is slow": "test_many_small_messages",
    "faster than the link": "test_a_clock_that_stops_before_wait",
    "cannot be retrieved": (
        "test_check_environment.py::test_a_name_that_resolves_only_backwards",
        "test_check_environment.py::test_a_name_that_does_not_lead_here",
    ),
    "`EADDRINUSE`": "test_collectives_running.py::test_who_holds_the_port",
    "`SignalException": (
        "test_collectives_running.py::test_a_job_ends_with_the_terminal",
        "test_collectives_running.py::test_a_job_outlives_the_terminal",
    ),
    "`bdb.BdbQuit`": (
        "test_collectives_running.py::test_a_breakpoint_without_a_terminal",
        "test_collectives_running.py::test_a_debugger_on_one_rank",
    ),
    "can't allocate memory": "test_collectives_running.py::test_out_of_memory_on_one_rank",
    "`exitcode  : -9`": "test_collectives_running.py::test_a_rank_that_the_kernel_ends",
    "goes on writing": "test_collectives_running.py::test_ranks_that_are_left",
}


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("collectives", tmp_path)


QUICK = ("--timeout", 0.3, "--cells", 9, "--steps", 2)


def test_a_group_is_beyond_use_after_a_timeout(copy):
    own = 'group, limit = dist.new_group(backend="gloo"), {"timeout": timeout}'
    copy.edit("point_to_point.py", own, 'group, limit = gloo, {"timeout": timeout}')
    broken = copy.run("point_to_point.py", *QUICK)
    assert broken.returncode == 1
    assert re.search(r"RuntimeError: .*[Cc]onnection (closed|reset)|Timed out", broken.output)
    copy.edit("point_to_point.py", 'group, limit = gloo, {"timeout": timeout}', own)
    assert " stuck " in copy.run("point_to_point.py", *QUICK).check().output


def passed_on(output: str) -> list[list[int]]:
    """The last list in each rank's line of minimal.py."""
    found = re.findall(r"^rank \d of .*passed on (\[.*\])$", output, re.M)
    return [[int(number) for number in one.strip("[]").split(",")] for one in found]


def test_a_buffer_must_have_the_length_of_the_message(copy):
    buffer = "passed_on = torch.zeros(1, dtype=torch.int64)"
    copy.edit("minimal.py", buffer, "passed_on = torch.full((1 + 2 * rank,), -7)")
    longer = copy.run("minimal.py").check().output
    assert passed_on(longer) == [[-7], [-6, -6, -6]]  # -7 + rank: only the first number came
    copy.edit("minimal.py", "(1 + 2 * rank,)", "(3 - 2 * rank,)")
    broken = copy.run("minimal.py")
    assert broken.returncode != 0  # rank 1 aborts; rank 0, whose connection closes, may end first
    assert "gloo::EnforceNotMet" in broken.output
    receive = "dist.recv(passed_on, src=rank - 1)"
    agree = "dist.recv(size := torch.zeros(1, dtype=torch.int64), src=rank - 1)"
    again = f"{agree}\n        passed_on = passed_on.new_zeros(size.item())\n        {receive}"
    copy.edit("minimal.py", receive, again)
    send = "dist.send(passed_on, dst=rank + 1)"
    copy.edit("minimal.py", send, f"dist.send(torch.tensor([3]), dst=rank + 1)\n        {send}")
    right = copy.run("minimal.py").check().output
    assert passed_on(right) == [[-7, -7, -7], [-6, -6, -6]]


def test_a_tensor_that_is_changed_before_wait(copy):
    received = r"3\. Rank 0 sends 7.*\n.*\n.*\n +1  - +\[(.*)\]"
    early = copy.run("point_to_point.py", *QUICK).check().output
    assert re.search(received, early)[1] == "-1.0"
    change, wait = "tensor.fill_(-1)", "work.wait()  # from here"
    copy.edit("point_to_point.py", change, "pass")
    copy.edit("point_to_point.py", wait, wait.replace("  #", f"\n        {change}  #"))
    late = copy.run("point_to_point.py", *QUICK).check().output
    assert re.search(received, late)[1] == "7.0"


def test_reduce_leaves_half_sums(copy):
    """The cure is what the script does: test_collectives_operations.py::test_collectives_script."""
    whole = "return y if dist.get_rank(group) == dst else None"
    copy.edit("collectives.py", whole, "return y")
    output = copy.run("collectives.py", "--only", "reduce", ranks=3).check().output
    sums = re.findall(r"^ +\d .*(\[.*\])$", output, re.M)
    assert sums[0] == "[30, 33, 36]"  # on dst
    assert sums[1:] != ["[10, 11, 12]", "[20, 21, 22]"]  # neither untouched
    assert sums[0] not in sums[1:]  # nor the sum


def test_src_counts_over_the_whole_job(copy):
    """Wanted: the number of the group's member 1, in a group of the ranks 1 and 2."""
    ours = '({"src": 0}, {"src": first}, {"group_src": 0})'
    copy.edit("process_groups.py", ours, '({"src": 0}, {"src": 1}, {"group_src": 1})')
    output = copy.run("process_groups.py", ranks=3).check().output
    outside = "Global rank 0 is not part of group"
    assert re.findall(rf"^ +\d  [01] +{outside} +(\d) +(\d)$", output, re.M) == [("1", "2")] * 2


def test_groups_made_in_another_order(copy):
    turn = "for ranks in lists:"
    of_rows = "groups_of(grid.tolist(), timeout=timedelta(seconds=1))"
    copy.edit("process_groups.py", "groups_of(grid.tolist())", of_rows)
    other = "for ranks in lists[:: -1 if dist.get_rank() == 3 else 1]:"
    copy.edit("process_groups.py", turn, other)
    hangs = copy.run("process_groups.py", ranks=4)
    assert hangs.returncode == 1
    assert "DistStoreError: wait timeout after 1000ms" in hangs.output
    copy.edit("process_groups.py", other, turn)
    assert "sum" in copy.run("process_groups.py", ranks=4).check().output


def test_a_second_group_without_a_prefix(copy):
    """Rank 0 joins late, so rank 1 finds the address that rank 0 had in the previous group.

    It is chance which of two ranks connects to the other, so the script makes 16 groups, not 2.
    """
    join = "dist.init_process_group(\n            backend, store=dist"
    late = "time.sleep(0.2 * (rank == 0))\n        "
    copy.edit("init_methods.py", join, late + join)
    copy.edit(
        "init_methods.py", 'for name in ("first", "second")', "for name in map(str, range(16))"
    )
    copy.run("init_methods.py").check()
    soon = join.replace("backend", "backend, timeout=timedelta(seconds=1)")
    copy.edit("init_methods.py", join, soon)
    copy.edit("init_methods.py", "store=dist.PrefixStore(name, store)", "store=store")
    broken = copy.run("init_methods.py")
    assert broken.returncode == 1
    # It fails, or it hangs and the group's timeout of a second ends it.
    said = "Gloo connectFullMesh failed|Timed out waiting 1000ms for (recv|send) operation"
    assert re.search(said, broken.output)


def test_many_small_messages(copy):
    """256 numbers in 256 messages or in one: each message is a collective and costs alpha.

    An object costs two collectives: its length, then its pickled bytes, which exceed its data.
    """
    (copy.path / "many.py").write_text(
        """
import torch, torch.distributed as dist
from runtime import distributed_worker

with distributed_worker("cpu") as worker:
    x = torch.ones(256)
    objects = [None] * worker.world_size
    parts = [torch.empty_like(x) for _ in objects]
    calls = {
        "small": lambda: [dist.all_reduce(part) for part in x.split(1)],
        "one": lambda: dist.all_reduce(x),
        "object": lambda: dist.all_gather_object(objects, x),
        "tensor": lambda: dist.all_gather(parts, x),
    }
    for name, call in calls.items():
        with torch.profiler.profile(record_shapes=True) as profile:
            call()
        collectives = [event for event in profile.events() if event.name.startswith("gloo:")]
        largest = max(event.input_shapes[0][0] for event in collectives)
        if worker.is_main:
            print(name, len(collectives), largest)
"""
    )
    output = copy.run("many.py").check().output
    seen = {
        name: (int(n), int(most))
        for name, n, most in re.findall(r"(\w+) (\d+) (\d+)$", output, re.M)
    }
    assert seen["small"] == (256, 1)
    assert seen["one"] == (1, 256)
    assert seen["tensor"] == (1, 256)
    collectives, nbytes = seen["object"]
    assert collectives == 2
    assert nbytes > 4 * 256


def test_a_clock_that_stops_before_wait(copy):
    """The fastest of three calls. Starting a transfer of 16 MB takes next to no time."""
    options = ("--operations", "all_reduce", "--min-bytes", "16M", "--max-bytes", "16M")

    def microseconds() -> float:
        output = copy.run("bandwidth.py", *options, "--repeats", 3).check().output
        return float(re.search(r"^all_reduce +16777216 +\S+ +(\S+) ", output, re.M)[1])

    waits = "return Case(lambda: dist.all_reduce(x, group=group), x)"
    copy.edit("bandwidth_cases.py", waits, waits.replace("group=group", "async_op=True"))
    launch = microseconds()
    copy.edit("bandwidth_cases.py", "async_op=True), x)", "async_op=True).wait(), x)")
    assert launch < microseconds() / 5
