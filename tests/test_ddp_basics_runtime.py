"""runtime.py, agreement.py, arguments.py: join, compare, report, leave; on several nodes, too."""

import json
import os
import platform
import shutil
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import agreement
import data
import pool
import pytest
import spawn
import torch
import torch.distributed as dist
import torchvision
import zero_optimizer
from arguments import ArgumentParser, UserError
from helpers import REPEAT, ROOT, Torchrun, free_port, learned, python, torchrun
from runtime import Worker, choose_backend, own_device

HERE = ROOT / "ddp_basics"
TRAIN = HERE / "train.py"
PRETEND = ROOT / "tests/workers/pretend_gpus.py"
CPU = torch.device("cpu")


# ---- the device of a rank


@pytest.fixture
def machine(monkeypatch):
    """This machine seems to have `count` accelerators; this process gets a local rank."""

    def pretend(kind: str | None, count: int, local_rank: int | None = None) -> None:
        found = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return pretend


@pytest.mark.parametrize(
    ("kind", "count", "local_rank", "device", "expected"),
    [
        (None, 0, 3, "auto", "cpu"),
        (None, 0, 0, "cpu", "cpu"),
        ("cuda", 4, None, "auto", "cuda:0"),  # one process
        ("cuda", 4, 3, "auto", "cuda:3"),
        ("cuda", 4, 3, "cuda", "cuda:3"),
        ("cuda", 4, 3, "cpu", "cpu"),
        ("cuda", 1, 3, "auto", "cuda:0"),  # Slurm: --gpus-per-task=1
        ("xpu", 2, 1, "auto", "xpu:1"),
        ("xpu", 2, 1, "xpu", "xpu:1"),
        ("mps", 1, 0, "auto", "cpu"),  # no backend sends its tensors
    ],
)
def test_a_rank_takes_the_device_of_its_local_rank(
    machine, kind, count, local_rank, device, expected
):
    machine(kind, count, local_rank)
    assert own_device(device) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "count", "local_rank", "device", "says"),
    [
        (None, 0, 0, "cuda", "needs its own cuda device, but sees 0"),
        ("cuda", 2, 2, "auto", "needs its own cuda device, but sees 2: start one rank per"),
        ("cuda", 2, 3, "cuda", "sees 2: start one rank per device, or pass --device cpu"),
        ("xpu", 2, 0, "cuda", "needs its own cuda device, but sees 0"),
    ],
)
def test_too_few_devices_are_an_error_and_not_a_job_on_cpus(
    machine, kind, count, local_rank, device, says
):
    machine(kind, count, local_rank)
    with pytest.raises(UserError, match=says):
        own_device(device)


def joined(gpus: list[list[str]], *flags, nodes: int = 2) -> pool.Result:
    """What ranks print that see these GPUs, if LOCAL_RANK is all that the launcher tells."""
    return pool.run(PRETEND, *flags, ranks=len(gpus), nodes=nodes, GPUS=json.dumps(gpus))


def test_two_nodes_of_two_gpus():
    says = joined([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], "--device", "auto").check()
    assert sorted(says.output.splitlines()) == [
        f"rank {rank} on cuda:{rank % 2}, [{rank % 2}], cpu:gloo,cuda:nccl" for rank in range(4)
    ]


def test_two_nodes_where_each_rank_sees_its_own_gpu():
    flags = ("--device", "cuda", "--backend", "gloo")
    says = joined([["a"], ["b"], ["c"], ["d"]], *flags).check()
    assert sorted(says.output.splitlines()) == [
        f"rank {rank} on cuda:0, [0], gloo" for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([["a", "b"], ["a", "b"], [], []], "all ranks need the same device type: rank 2 on"),
        (
            [["a"], ["a"], ["c"], ["d"]],
            "rank 1 on node0 has the same GPU as rank 0 on node0: start",
        ),
        (
            [["a", "b"], ["a", "b"], ["c", "d", "e"], []],
            "all ranks need the same device type: rank 3 on node1 has 'cpu', "
            "rank 0 on node0 has 'cuda'",
        ),
    ],
)
def test_ranks_that_differ_in_their_devices_never_connect(gpus, says):
    """A node that lost a GPU, or its driver; two ranks on one GPU."""
    result = joined(gpus, "--device", "auto")
    assert result.returncode == 2
    lines = set(result.output.splitlines())  # each node says it
    assert len(lines) == 1, result.output
    assert f"pretend_gpus.py: error: {says}" in lines.pop()


def test_the_host_with_too_few_gpus_is_named():
    result = joined([["a", "b", "c"]] * 3 + [["d", "e"]] * 3, "--device", "auto")
    assert result.returncode == 2
    assert "error: rank 5 on node1 needs its own cuda device, but sees 2: " in result.output
    assert "on cuda" not in result.output


# ---- ranks that are not one job


JOIN = """
from runtime import distributed_worker
with distributed_worker("cpu"):
    print("joined")
"""


def each(*commands: tuple) -> pool.Result:
    """Run (script, arguments ...) for each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = []
    try:
        for rank, command in enumerate(commands):
            told = pool.environment(rank, len(commands), store)
            jobs.append(pool.Rank(*command, beside=jobs[0] if jobs else None, **told))
        status, _ = pool.first_failure(jobs, pool.Patience(jobs, 120))
        return pool.Result(status, jobs[0].output)
    finally:
        for job in jobs:
            job.kill()


@pytest.fixture
def folders(tmp_path):
    """Two hosts' copies of a script and its modules."""
    for host in "ab":
        (tmp_path / host / "job").mkdir(parents=True)
        for name in ("runtime.py", "agreement.py", "arguments.py"):
            shutil.copy(HERE / name, tmp_path / host / "job")
        (tmp_path / host / "job/join.py").write_text(JOIN)
    return [tmp_path / host / "job/join.py" for host in "ab"]


def test_equal_ranks_join(folders):
    result = each((folders[0], "--lr", 1), (folders[1], "--lr", 1)).check()
    assert result.output.count("joined") == 2


def test_different_flags_are_one_sentence(folders):
    result = each((folders[0], "--lr", 1), (folders[1], "--lr", 2))
    host = platform.node()
    assert (result.returncode, result.output) == (
        2,
        f"join.py: error: all ranks need the same flags: rank 1 on {host} has '--lr 2', "
        f"rank 0 on {host} has '--lr 1'\n",
    )


def test_different_code_is_one_sentence(folders):
    (folders[1].parent / "task.py").write_text("lr = 2\n")
    result = each((folders[0],), (folders[1],), (folders[0],))
    assert result.returncode == 2
    assert result.output.count("\n") == 1
    assert "error: all ranks need the same sha256 of job/*.py: rank 1 on " in result.output


def test_what_else_must_be_equal(monkeypatch):
    def about() -> dict:
        equal = agreement.what_must_be_equal(CPU)
        return {"host": "h", "gpu": "", "problem": "", "equal": equal}

    ranks = [about(), about()]
    assert agreement.find_problem(ranks) == ""
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert "version of torch: rank 2 on h has '1.0'" in agreement.find_problem([*ranks, about()])
    monkeypatch.undo()
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("2", "7", "18"))
    assert "Python: rank 2 on h has '2.7', rank 0" in agreement.find_problem([*ranks, about()])


class CountingStore:
    def __init__(self, others: dict):
        self.values, self.asked = others, 0

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        self.asked += 1
        return self.values[key]


def test_one_rank_reads_all_and_the_others_read_one_key(monkeypatch):
    others = CountingStore({})
    agreement.compare_ranks(others, 0, 1, CPU, "")
    mine = others.values["about rank 0"]
    store = CountingStore({f"about rank {rank}": mine for rank in range(1000)})
    agreement.compare_ranks(store, 0, 1000, CPU, "")
    assert store.asked == 1001
    store.asked = 0
    agreement.compare_ranks(store, 7, 1000, CPU, "")
    assert store.asked == 1


# ---- the backend


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "cpu:gloo,cuda:nccl"),
        (None, "xpu", "cpu:gloo,xpu:xccl"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),  # NCCL alone could not send a CPU tensor
        ("NCCL", "cuda", "cpu:gloo,cuda:nccl"),
        ("gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:gloo", "cuda", "cpu:gloo,cuda:gloo"),
        ("cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_cpu_tensors_always_have_a_backend(monkeypatch, name, kind, expected):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert choose_backend(name, kind) == expected


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "--backend nowhere is not in this build of torch"),
        ("cpu:nowhere", "--backend cpu:nowhere is not in this build of torch"),
        ("a/b", "--backend a/b is not in this build of torch"),
        ("cuda:gloo", "--backend cuda:gloo is for tensors on cuda; this job is on cpu"),
        ("nccl", "--backend nccl is "),  # a build for CPUs does not have it
    ],
)
def test_a_backend_that_cannot_be_had_is_one_sentence(monkeypatch, capsys, name, says):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        choose_backend(name, "cpu")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"error: {says}" in error
    assert error.count("\n") == 1


def test_flags_are_written_out(capsys):
    """Slurm's scripts look for --output-dir in the command: they would not see --output."""
    parser = ArgumentParser()
    parser.add_argument("--output-dir")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--output", "runs"])
    assert end.value.code == 2
    assert "error: unrecognized arguments: --output runs\n" in capsys.readouterr().err


# ---- what torchrun shows


MISTAKE = """
import sys
sys.path.insert(0, {directory!r})
from arguments import ArgumentParser, UserError, at_least
from runtime import distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    parser = ArgumentParser()
    parser.add_argument("--steps", type=at_least(1))
    parser.parse_args()
    with distributed_worker("cpu"):
        raise UserError("there is no data in data/: download it")

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "there is no data in data/: download it"),
        (("--steps", "0"), "--steps: must be an integer of at least 1, not 0"),
    ],
)
def test_torchruns_report_ends_with_the_sentence(tmp_path, flags, sentence):
    script = tmp_path / "mistake.py"
    script.write_text(MISTAKE.format(directory=str(HERE)))
    result = torchrun(script, *flags, cold=True)
    *_, last, rule = result.output.splitlines()
    assert last == f"  traceback : {sentence}"
    assert set(rule) == {"="}
    assert result.output.count(f"mistake.py: error: {sentence}\n") == 1
    assert "To enable traceback" not in result.output


# ---- two nodes of two ranks: rank and local rank differ

RUN = ("--epochs", 1, "--log-every", 4)


in_a_release = pytest.param("fsdp_basics", marks=pytest.mark.release)


@pytest.fixture(scope="module", params=["ddp_basics", in_a_release])
def on_one_node(request, tmp_path_factory):
    """(the template, the folder of its run with four ranks on one node)"""
    script, folder = ROOT / request.param / "train.py", tmp_path_factory.mktemp("one")
    pool.run(script, *RUN, "--output-dir", folder, ranks=4).check()
    return script, folder


def saved_generators(folder) -> list:
    """The states of the ranks' random generators at the end."""
    last = max((folder / "checkpoints").glob("step_*"))
    file = last / "run.pt" if last.is_dir() else last
    return [state["cpu"].tolist() for state in torch.load(file, weights_only=True)["generators"]]


def same_run(folder, expected) -> None:
    """The same losses and test results to the last bit, and other random numbers on each rank."""
    assert learned(folder) == learned(expected) != []
    generators = saved_generators(folder)
    assert generators == saved_generators(expected)
    assert all(a != b for rank, a in enumerate(generators) for b in generators[:rank])


@pytest.mark.slow
def test_two_nodes_train_as_one_does(on_one_node, tmp_path):
    script, folder = on_one_node
    pool.run(script, *RUN, "--output-dir", tmp_path, ranks=4, nodes=2).check()
    same_run(tmp_path, folder)


@pytest.mark.slow
def test_two_torchruns_train_as_one_does(on_one_node, tmp_path):
    script, folder = on_one_node
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    nodes = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=test", endpoint)
    start = partial(Torchrun, script, *RUN, "--output-dir", tmp_path, options=nodes)
    with start() as a, start() as b:
        results = a.wait().check(), b.wait().check()
        assert not a.left_running() + b.left_running()
    assert sum("4 rank(s) on cpu, gloo" in result.output for result in results) == 1
    same_run(tmp_path, folder)


def test_ddp_gets_the_index_of_the_device(monkeypatch):
    """Not the local rank: where each process sees one GPU, that has the index 0."""
    asked = []
    device = torch.device("meta", 0)  # stands for a GPU: it computes nothing
    worker = Worker(rank=3, local_rank=1, world_size=4, device=device)
    args = types.SimpleNamespace(channels=4, steps=0, batch_size=4, output=None)

    def ddp(model, device_ids):
        asked.append(device_ids)
        raise InterruptedError

    for module, use in (
        (zero_optimizer, lambda: zero_optimizer.build(args, worker)),
        (spawn, lambda: spawn.train(args, worker)),
    ):
        monkeypatch.setattr(module, "DistributedDataParallel", ddp)
        with pytest.raises(InterruptedError):
            use()
    assert asked == [[0], [0]]


@pytest.mark.parametrize(("rank", "local_rank", "downloads"), [(2, 0, True), (1, 1, False)])
def test_the_first_rank_of_each_node_downloads(tmp_path, monkeypatch, rank, local_rank, downloads):
    asked = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    def mnist(folder, download):
        asked.append(download)
        (type(tmp_path)(folder) / "MNIST").mkdir()

    monkeypatch.setattr(torchvision.datasets, "MNIST", mnist)
    data.download_mnist(tmp_path)
    assert asked == [True] * downloads
    assert (tmp_path / "MNIST").exists() == downloads


def test_script_that_is_no_job_of_torchrun_ignores_a_stray_world_size(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from runtime import distributed_worker\n"
        "with distributed_worker('cpu') as worker:\n    print('ranks', worker.world_size)\n"
    )
    assert "ranks 1" in python(script, WORLD_SIZE="4").check().output


# ---- restarts and exits, many times: REPEAT=100 pytest -k "restarts_join or status_0"


DIE = """
import os, signal, sys
sys.path.insert(0, {directory!r})
import torch, torch.distributed as dist
from runtime import distributed_worker
with distributed_worker("cpu") as worker:
    value = torch.ones(1000)
    dist.all_reduce(value)
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < {repeat} and worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(value)
    assert value.sum() == 4000
"""


@pytest.mark.slow
@pytest.mark.timeout(600 + 10 * REPEAT)
def test_restarts_join_every_time(tmp_path):
    """The restart race of torchrun (see runtime.py) let about one restart in eight come through."""
    script = tmp_path / "die.py"
    script.write_text(DIE.format(directory=str(HERE), repeat=REPEAT))
    options = (f"--max-restarts={REPEAT}", "--monitor-interval=0.1")
    torchrun(script, options=options, timeout=60 + 10 * REPEAT).check()


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * REPEAT)
def test_runs_end_with_status_0():
    """Two at a time: on a busy machine the abort at exit struck in a quarter of the runs.

    test_leaving_joins_the_threads_of_the_group looks at its cause; for its frequency set REPEAT.
    """
    with ThreadPoolExecutor(2) as threads:
        run = partial(torchrun, TRAIN, "--epochs", 1, cold=True)
        for running in [threads.submit(run) for _ in range(REPEAT)]:
            running.result().check()


LEAVE = """
import os, sys, time
sys.path.insert(0, {directory!r})
import torch
from runtime import distributed_worker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

def threads():
    names = []
    for thread in os.listdir("/proc/self/task"):
        try:
            names.append(open(f"/proc/self/task/{{thread}}/comm").read())
        except OSError:
            pass  # ended since it was listed
    return names

def train(kind):
    if kind == "dtensor":  # its caches hold the mesh, and the mesh its groups
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        return (tensor @ tensor.redistribute(mesh, [Replicate()])).full_tensor()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    return model

with distributed_worker("cpu"):
    kept = train(sys.argv[1])
    if sys.argv[1] != "keep":
        kept = None
    assert any("gloo" in name for name in threads())
deadline = time.monotonic() + 5  # the kernel lists a joined thread for a moment; a live one stays
while any("gloo" in name for name in threads()) and time.monotonic() < deadline:
    time.sleep(0.01)
print("gloo threads", sum("gloo" in name for name in threads()))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads thread names from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "dtensor"])
def test_leaving_joins_the_threads_of_the_group(tmp_path, kind):
    """The cause of the abort at exit, not its frequency: no thread of Gloo may be left."""
    script = tmp_path / "leave.py"
    script.write_text(LEAVE.format(directory=str(HERE)))
    assert "gloo threads 0" in python(script, kind, cold=True).check().output


@pytest.mark.slow
def test_a_model_that_outlives_the_group_is_warned_of(tmp_path):
    """The work is done: to fail now would make --max-restarts do it again."""
    script = tmp_path / "leave.py"
    script.write_text(LEAVE.format(directory=str(HERE)) + "os._exit(0)  # no abort\n")
    output = python(script, "keep", cold=True).check().output
    assert output.count("warning: something still holds the process group") == 1


LATE = """
import os, sys, time
sys.path.insert(0, {directory!r})
import torch.distributed as dist
from arguments import UserError
from runtime import distributed_worker

def join(*args, **kwargs):
    real(*args, **kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(1)  # still making connections, as far as rank 0 can know
        print("rank 1 has joined")

real, dist.init_process_group = dist.init_process_group, join
with distributed_worker("cpu"):
    raise UserError("a mistake")
"""


def test_a_mistake_is_said_when_all_have_joined(tmp_path):
    """Else a rank that is still connecting fails, with a traceback beside the one sentence."""
    script = tmp_path / "late.py"
    script.write_text(LATE.format(directory=str(HERE)))
    result = pool.run(script, ranks=2)
    assert result.returncode == 2
    assert result.output.endswith("rank 1 has joined\nlate.py: error: a mistake\n")


WARNS = """
import sys
sys.path.insert(0, {directory!r})
import torch.distributed as dist
from arguments import UserError
from runtime import distributed_worker

class Group:  # as ProcessGroupNCCL: lives in a module, and warns when Python exits
    def __del__(self):
        print("destroy_process_group() was not called before program exit")

dist.left = Group()
with distributed_worker("cpu"):
    print("this line waits in the buffer")
    raise UserError("a mistake")
"""


@pytest.mark.slow
def test_a_mistake_is_the_last_word(tmp_path):
    """NCCL would warn of its group, and a thread of Gloo could abort the exit."""
    script = tmp_path / "warns.py"
    script.write_text(WARNS.format(directory=str(HERE)))
    result = python(script, cold=True, PYTHONUNBUFFERED="")
    assert result.returncode == 2
    _, *said = result.output.splitlines()  # the first line is about ranks and devices
    assert said == ["this line waits in the buffer", "warns.py: error: a mistake"]
