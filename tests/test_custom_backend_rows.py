"""custom_backend/: each row of "What usually goes wrong" is provoked on its backend, and cured."""

import json
import re

import pytest
import torch
from rows import Copy

ROWS = {
    # the ring
    "rank 2 has not begun it": "test_custom_backend_ring.py::test_a_missing_rank_is_named",
    "rank 1 does not answer": (
        "test_custom_backend_ring.py::test_a_rank_that_does_not_answer_is_named"
    ),
    "All ranks have begun it": (
        "test_custom_backend_ring.py::test_a_slow_network_is_told_from_a_missing_rank"
    ),
    "its connection has ended": (
        "test_custom_backend_ring.py::test_a_dead_rank_is_named_at_once",
        "test_custom_backend_ring.py::test_a_process_that_dies_is_named",
    ),
    "rank 2 has left the group": (
        "test_custom_backend_ring.py::test_who_has_left_is_missed_only_by_those_who_want_something"
    ),
    "has called all_reduce int32 MAX": (
        "test_custom_backend_ring.py::test_other_operations_are_told_apart"
    ),
    "rank 1 has failed in it": (
        "test_custom_backend_ring.py::test_a_rank_that_found_an_error_is_named_after_the_timeout"
    ),
    "has sent 12 bytes": "test_custom_backend_ring.py::test_other_sizes_are_told_apart",
    "receive from rank 1, tag 3": (
        "test_custom_backend_ring.py::test_receive_names_who_sends_nothing"
    ),
    "did not join the group": (
        "test_custom_backend_ring.py::test_a_rank_that_does_not_join_is_named"
    ),
    "cannot reach rank 0": "test_custom_backend_ring.py::test_an_address_of_nobody",
    # groups in Python
    "hangs now and then": "not provoked: it hangs once in many runs, in threads of Gloo's",
    "`Work::getFuture not implemented`": "test_a_work_without_a_future",
    "`No backend type associated": "test_a_group_without_a_method",
    "`Unknown backend type counting`": "test_a_backend_that_nobody_has_registered",
    "no table at the end": "test_custom_backend_counting.py::test_a_script_that_fails_says_so",
    "`not counted: rank(s) 1`": "test_a_rank_that_does_not_report",
    "that you never wrote": (
        "test_custom_backend_counting.py::test_every_call_is_counted",
        "test_custom_backend_counting.py::test_a_script_that_is_nobodys",
    ),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2.14", reason="needs torch 2.14 or newer"),
]


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("custom_backend", tmp_path)


def test_a_work_without_a_future(copy):
    method = "    def get_future(self):\n        return self.future\n"
    copy.edit("minimal.py", method, "")
    result = copy.run("minimal.py")
    assert result.returncode != 0
    assert "Work::getFuture not implemented" in result.output
    copy.edit(
        "minimal.py", "    def wait(self, *timeout):", f"{method}\n    def wait(self, *timeout):"
    )
    assert "gradients off by" in copy.run("minimal.py").check().output


def test_a_group_without_a_method(copy):
    copy.edit(
        "minimal.py",
        "DistributedDataParallel(model, init_sync=False)",
        "DistributedDataParallel(model)",
    )
    result = copy.run("minimal.py")
    assert result.returncode != 0
    assert "No backend type associated with device type cpu" in result.output
    methods = """    def allgather(self, outputs, inputs, options):
        for output, value in zip(outputs[0], self.exchange(inputs[0]), strict=True):
            output.copy_(value.view_as(output))
        return Done(outputs)

    def broadcast(self, tensors, options):
        tensors[0].copy_(self.exchange(tensors[0])[options.rootRank].view_as(tensors[0]))
        return Done(tensors)

"""
    barrier = "    def barrier(self, opts):"
    copy.edit("minimal.py", barrier, methods + barrier)
    assert "gradients off by" in copy.run("minimal.py").check().output


@pytest.mark.slow
def test_a_backend_that_nobody_has_registered(copy):
    script = copy.path / "mine.py"
    script.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        'dist.init_process_group("counting")\n'
        "dist.all_reduce(torch.ones(2))\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    result = copy.run("mine.py")
    assert result.returncode == 1
    assert re.search("[Uu]nknown backend type:? counting", result.output)
    copy.edit("mine.py", "import torch\n", "import counting_backend, torch\n")
    table = copy.run("mine.py", cold=True).check().output  # at exit
    assert re.search(r"^all_reduce .* mine\.py:4 <module>$", table, re.M)


def test_a_rank_that_does_not_report(copy):
    script = copy.path / "mine.py"
    script.write_text(
        "import os, torch\n"
        "import torch.distributed as dist\n"
        'dist.init_process_group("gloo")\n'
        "dist.all_reduce(torch.ones(2))\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(0)\n"
        "dist.destroy_process_group()\n"
    )
    text = (copy.path / "call_log.py").read_text()
    patience = re.search(r"^PATIENCE = .*$", text, re.M)[0]
    copy.edit("call_log.py", patience, "PATIENCE = timedelta(seconds=1)")
    folder = copy.path / "trace"
    result = copy.run("counting_backend.py", "--trace", folder, "mine.py", ranks=3).check()
    assert "not counted: rank(s) 1, which did not come to the end" in result.output
    (row,) = re.findall(r"^all_reduce .*$", result.output, re.M)
    assert set(re.findall(r"rank \d", row)) == {"rank 0", "rank 2"}
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}
    copy.edit("mine.py", "    os._exit(0)\n", "    pass\n")
    assert "not counted" not in copy.run("counting_backend.py", "mine.py").check().output
