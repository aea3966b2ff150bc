"""rpc_basics/: each row of "What usually goes wrong" is provoked in its script, then fixed."""

import re

import pytest
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "could not find destination": "test_failures_of_calls",
    "`RPC ran for more": "test_failures_of_calls",
    "Can't pickle local object": "test_failures_of_calls",
    "`to_here()`": "test_failures_of_calls",
    "calls that call back": (
        "test_rpc_basics_faults.py::test_a_call_that_calls_back_needs_a_second_thread"
    ),
    "`KeyError`": "test_gradients_and_where_they_are",
    "initial values differ": "test_two_threads_share_a_random_generator",
    "`.grad` is None": "test_gradients_and_where_they_are",
    "`DeprecationWarning": (
        "test_rpc_basics.py::test_gradients_over_three_workers_are_those_of_one_process"
    ),
    "`needs 3 workers": (
        "test_rpc_basics.py::test_too_few_workers_is_one_sentence",
        "test_rpc_basics.py::test_gradients_over_three_workers_are_those_of_one_process",
    ),
    "async_execution": (
        "test_a_server_that_waits_for_a_trainer_that_has_ended",
        "test_rpc_basics_parameter_server.py::test_where_one_is_needed_its_death_ends_the_job",
    ),
    "at chance accuracy": "test_gradients_that_are_too_stale",
    "`Gloo connectFullMesh failed`": "test_init_rpc_after_a_restart",
}


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("rpc_basics", tmp_path)


def test_failures_of_calls(copy):
    failed = copy.run("calls.py").check().output
    for message in (
        "could not find destination name worker99",
        "RPC ran for more than set timeout (200 ms)",
        "Can't pickle local object",
        "after to_here().pay_in(1000)      125.0",
    ):
        assert message in failed
    copy.edit("calls.py", '"worker99", process_of', "RpcWorker.name_of(1), process_of")
    copy.edit("calls.py", "import rpc_worker", "import RpcWorker, rpc_worker")
    copy.edit("calls.py", "wait_for_the_door, timeout=0.2", "wait_for_the_door, timeout=20")
    copy.edit("calls.py", "return OPEN.wait(60)", "return OPEN.wait(1)")
    copy.edit("calls.py", "other, lambda: 1", "other, process_of")
    copy.edit("calls.py", "account.to_here().pay_in(1000.0)", "account.rpc_sync().pay_in(1000.0)")
    right = copy.run("calls.py").check().output
    assert re.findall(r"(\S+) +\w+Error after", right) == ["raises"]  # as it should
    assert "after to_here().pay_in(1000)      1125.0" in right


def test_gradients_and_where_they_are(copy):
    """New references, such as those that a worker receives: the first call is rpc_async."""
    script = "distributed_autograd.py"
    copy.edit(script, "class Layer", "def same(thing):\n    return thing\n\n\nclass Layer")
    again = "    owners = ('worker1', 'worker2', 'worker0')\n    layers = ["
    again += "rpc.rpc_sync(o, same, args=(layer,)) for o, layer in zip(owners, layers)]\n"
    alone = "    alone = nn.Sequential"
    copy.edit(script, alone, again + alone)
    copy.edit(
        script, "layer.rpc_sync().forward(hidden)", "layer.rpc_async().forward(hidden).wait()"
    )
    step = "            optimizer.step(context)"
    grad = "            print('grad:', layers[2].local_value().linear.weight.grad)\n"
    copy.edit(script, step, grad + step)
    result = copy.run(script, ranks=3)
    assert result.returncode == 1
    assert "KeyError: Parameter containing" in result.output
    asked = "    [layer.rpc_sync().references() for layer in layers]\n"
    copy.edit(script, again, again + asked)
    output = copy.run(script, ranks=3).check().output
    assert output.count("grad: None") == 5
    gradient = re.search(r"one process: gradient (\S+), ", output)[1]
    assert float(gradient) < 1e-6


def test_two_threads_share_a_random_generator(copy):
    """A barrier forces the race: both threads have set the seed before either one draws."""
    script, seed = "distributed_autograd.py", "        torch.manual_seed(number)\n"
    copy.edit(script, seed, seed + "        BOTH.wait(20)\n")
    copy.edit(script, "\nBATCH = ", "\nBOTH = __import__('threading').Barrier(2)\nBATCH = ")
    twins = """
    twins = [rpc.remote('worker1', Layer, args=(0,)) for _ in range(2)]
    weights = [twin.to_here().linear.bias for twin in twins]
    print("twins are equal:", torch.equal(*weights))
    return
"""
    copy.edit(script, "    # Three references", twins + "    # Three references")
    assert "twins are equal: False" in copy.run(script, ranks=3).check().output
    draws = "self.linear = nn.Linear(WIDTHS[number], WIDTHS[number + 1])\n"
    own = "        own = torch.Generator().manual_seed(number)\n"
    own += "        for parameter in self.linear.parameters():\n"
    own += "            nn.init.uniform_(parameter, -0.1, 0.1, generator=own)\n"
    copy.edit(script, draws, draws + own)
    assert "twins are equal: True" in copy.run(script, ranks=3).check().output
    copy.edit(script, own, "")
    copy.edit(script, "Barrier(2)", "Barrier(1)")
    together = "twins = [rpc.remote('worker1', Layer, args=(0,)) for _ in range(2)]\n"
    copy.edit(script, together, "twins = [rpc.RRef(Layer(0)), rpc.RRef(Layer(0))]\n")
    assert "twins are equal: True" in copy.run(script, ranks=3).check().output


def test_a_server_that_waits_for_a_trainer_that_has_ended(copy):
    """The second trainer makes only half of the pushes."""
    script, short = "batched_server.py", ("--steps", 4, "--timeout", 4)
    copy.edit(script, "range(args.steps)", "range(args.steps // worker.rank)")
    result = copy.run(script, *short, ranks=3)
    assert result.returncode == 1
    assert "RPC ran for more than set timeout (4000 ms)" in result.output
    copy.edit(script, "range(args.steps // worker.rank)", "range(args.steps)")
    assert "8 pushes, 4 updates" in copy.run(script, *short, ranks=3).check().output


@pytest.mark.release
def test_gradients_that_are_too_stale(copy):
    def accuracy(*args) -> float:
        output = copy.run("parameter_server.py", "--steps", 60, *args, ranks=4).check().output
        return float(output.split("accuracy: ")[1])

    stale, heavy = ("--pull-every", 16), ("--momentum", 0.95)
    assert accuracy(*stale, *heavy) < 0.3  # of 10 classes
    assert accuracy(*stale, *heavy, "--max-staleness", 1) > 0.5
    assert accuracy("--pull-every", 1, *heavy) > 0.5
    assert accuracy(*stale, "--momentum", 0.5) > 0.5


@pytest.mark.release
def test_init_rpc_after_a_restart(copy):
    """minimal.py uses only init_rpc. It is chance what a rank reads, so there are 4 attempts."""
    last = "os.environ['TORCHELASTIC_RESTART_COUNT'] == os.environ['TORCHELASTIC_MAX_RESTARTS']"
    dies = f"        if not {last}:\n            os._exit(1)\n"
    asks = '        ask(f"worker{world_size - 1}")\n'
    copy.edit("minimal.py", asks, asks + dies)
    try:
        output = copy.torchrun("minimal.py", options=("--max-restarts=3",), timeout=30).output
    except TimeoutError as error:  # a rank waits for 30 minutes
        output = str(error)
    assert re.search(r"Gloo connectFullMesh failed|in init_rpc", output)
    text = (copy.path / "minimal.py").read_text()
    ours = "    from rpc_worker import rpc_worker\n\n    with rpc_worker(20):\n"
    ours += "    ".join(["", "    if rank == 0:\n", *(asks + dies).splitlines(keepends=True)])
    copy.edit("minimal.py", text[text.index("    # Returns when all") :], ours)
    output = copy.torchrun("minimal.py", options=("--max-restarts=1",)).check().output
    assert output.count("has counted to 6") == 2
    assert "connectFullMesh failed" not in output
