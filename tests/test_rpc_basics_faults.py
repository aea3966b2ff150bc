"""An RPC worker that dies, fails or is slow: the other workers notice, and all processes end.

The workers are started one by one: torchrun would end all of them when the first one fails.
"""

import re
import socket
from contextlib import ExitStack

import pool
import pytest
import torch.distributed as dist
from helpers import ROOT, Result, torchrun

pytestmark = pytest.mark.slow  # each launch of workers takes some seconds

WORKER = ROOT / "tests/workers/rpc_faults.py"


def run(what: str, timeout: float, ranks: int = 3) -> list[Result]:
    """timeout: of each call, in seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return start(what, timeout, [pool.environment(rank, ranks, store) for rank in range(ranks)])


def start(what: str, timeout: float, environments: list[dict]) -> list[Result]:
    with ExitStack() as stack:
        command = (WORKER, what, timeout, 16)
        jobs = [stack.enter_context(pool.Rank(*command, **told)) for told in environments]
        return [job.wait(60) for job in jobs]


def first_of(ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank 0 without torchrun: it listens at the port."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": "0", "WORLD_SIZE": str(ranks), **place}


def test_a_worker_killed_in_the_middle_of_a_call():
    first, second, third = run("killed", timeout=20)
    assert third.returncode == -9
    assert "the call ended with a RuntimeError" in first.output
    for result, name in ((first, "worker0"), (second, "worker1")):
        assert result.returncode == 1, result.output
        assert re.search(rf"RuntimeError: {name} leaves .* no answer from .*worker2", result.output)


def test_a_second_job_knows_nothing_of_the_first():
    """Else a worker of it would take a busy worker for one that is done, and leave."""
    first, second = run("again", timeout=60, ranks=2)
    assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "of before: set()\n" in first.output


def test_a_worker_that_does_not_come():
    (alone,) = start("joins", 2, [first_of(2, port=0)])
    assert alone.returncode == 1
    assert re.search("RuntimeError: worker0 waited 2 s at localhost:0 for 2 workers", alone.output)


def test_two_workers_of_one_name():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosts = [pool.environment(rank, 2, store) | {"LOCAL_RANK": "0"} for rank in (0, 1, 1)]
    first, *twins = start("joins", 20, hosts)
    assert first.returncode == 0, first.output
    joined, refused = sorted(twins, key=lambda result: result.returncode)
    assert joined.returncode == 0, joined.output
    assert refused.returncode == 2, refused.output
    assert refused.output.endswith("error: there is a worker1 already: two processes have RANK=1\n")


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (result,) = start("joins", 20, [first_of(1, port)])
    assert result.returncode == 2, result.output
    assert f"error: localhost:{port} is in use: choose another MASTER_PORT\n" in result.output
    assert "Traceback" not in result.output


def test_answers_that_are_too_large():
    first, second = run("too_much", timeout=20, ranks=2)
    assert "1000000000000000: " in first.check().output
    assert "can't allocate memory" in first.output
    assert re.search(r"268435456: .*timeout", first.output)
    assert "then [0.0, 0.0]\n" in first.output
    # Before this line torch may report that the late answer never came: worker1 has ended.
    assert first.output.endswith("left\n")
    assert "left\n" in second.check().output


def test_a_worker_that_fails_while_it_answers_a_call():
    *others, failed = run("raises", timeout=20)
    assert failed.returncode == 1, failed.output
    assert "worker2 cannot go on" in failed.output
    for result in others:
        assert result.returncode == 1, result.output
        assert re.search(r"RuntimeError: .* no answer from .*worker2", result.output)


def test_workers_that_are_done_answer_for_as_long_as_they_are_needed():
    first, second = run("late", timeout=2, ranks=2)
    assert "all calls answered\nleft\n" in first.check().output
    assert "left\n" in second.check().output


def test_a_mistake_of_the_users():
    told, *others = run("mistaken", timeout=20)
    assert told.returncode == 2, told.output
    assert told.output.endswith("error: there is no such file\n")
    assert "Traceback" not in told.output
    assert {other.returncode for other in others} == {1}


def test_a_call_that_calls_back_needs_a_second_thread():
    output = pool.run(WORKER, "nested", 20, 2, timeout=60).check().output
    assert "the answer is 42\nleft\n" in output
    with pytest.raises(TimeoutError, match="in call_back"):  # its own timeout is one second
        pool.run(WORKER, "nested", 2, 1, timeout=4)


def test_under_torchrun_a_failure_ends_the_job():
    result = torchrun(WORKER, "raises", 20, 16, ranks=3, timeout=60)
    assert result.returncode == 1
    assert "worker2: ValueError: worker2 cannot go on" in result.output
