"""benchmarks/gpu.py: its steps on a machine without a GPU, and that one bad step costs one step."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import helpers
import pytest
from helpers import EMULATED, HAS_EMULATED, ROOT, Job

BENCHMARKS = ROOT / "benchmarks"
SCRIPT = BENCHMARKS / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


@pytest.fixture
def choice(gpu):
    import gpu_scripts

    return gpu_scripts


def carry_out(gpu, monkeypatch, folder, *flags, **steps) -> tuple[int, dict]:
    """Run gpu.py's main() with these steps instead of its own: (exit status, what gpu.json has).

    steps: name -> (function, minutes).
    """
    steps = {name: gpu.Step(*step, f"Step {name}") for name, step in steps.items()}
    monkeypatch.setattr(gpu, "STEPS", steps)
    arguments = ["gpu.py", "--device", "cpu", "--output-dir", str(folder), *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        with pytest.raises(SystemExit) as end:
            gpu.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(end.value.code), read(folder)["steps"]


def read(folder) -> dict:
    return json.loads((folder / "gpu.json").read_text())


def python(code: str) -> tuple:
    return (sys.executable, "-c", code)


def say(text: str):
    """A step whose one command prints this."""
    return lambda job: job.run("says", *python(f"print({text!r})"), expects=text)


HANGS = """
import json, os, subprocess, sys, time
print('SAMPLES ' + json.dumps({'row': {'value': 1.5}}), flush=True)
print('SAMPLES {"cut": ', end='', flush=True)
sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
print('\\nchild', subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
try:
    time.sleep(600)
finally:
    print('what pytest says after Ctrl-C', flush=True)
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_at_its_limit(gpu, monkeypatch, tmp_path):
    """With a child in a session of its own; its rows stay, and the other steps run.

    10 seconds: on a busy machine a Python may take three to print its first line.
    """

    def hang(job):
        job.run_all({"hangs": python(HANGS), "waits": python("print('never')")})

    seen = []

    def look(job):
        seen.append(read(tmp_path)["steps"]["hang"])
        say("hello")(job)

    status, steps = carry_out(
        gpu, monkeypatch, tmp_path, hang=(hang, 10 / 60), after=(look, 1), last=(say("end"), 1)
    )
    assert status == 1
    assert [step["status"] for step in steps.values()] == ["failed", "passed", "passed"]
    assert "hangs was ended at the time limit; waits was not started" in steps["hang"]["reason"]
    assert steps["hang"]["rows"] == {"row": {"value": 1.5}}
    assert 10 <= steps["hang"]["seconds"] < 60
    output = steps["hang"]["runs"]["hangs"]["output"]
    assert "what pytest says after Ctrl-C" in output
    child = int(re.search(r"child (\d+)", output)[1])
    assert not helpers.still_running(helpers.those(lambda process: process.pid == child))
    assert seen == [steps["hang"]]  # the file had it before the next step began
    page = (tmp_path / "gpu.md").read_text()
    assert "## Step hang" in page
    assert "| row | 1.5 |" in page


@pytest.mark.slow
def test_one_command_that_hangs_leaves_time_for_the_others(gpu, monkeypatch, tmp_path):
    def run(job):
        commands = {"hangs": python(HANGS), "good": python("print('good')")}
        job.run_all(commands, expects="good|child", seconds=10)

    status, steps = carry_out(gpu, monkeypatch, tmp_path, run=(run, 5))
    assert status == 1
    assert steps["run"]["reason"] == "Failed: hangs was ended at the time limit"
    assert steps["run"]["runs"]["good"]["status"] == "passed"


@pytest.mark.slow
def test_a_process_that_cannot_be_killed_costs_one_step(gpu, monkeypatch, tmp_path):
    """It hangs in a driver, for example: the day does not wait for it longer than KILL_SECONDS."""
    import gpu_guard

    monkeypatch.setattr(gpu_guard, "KILL_SECONDS", 0.2)
    with monkeypatch.context() as immortal:
        immortal.setattr(gpu_guard.os, "kill", lambda pid, signal: None)

        def hang(job):
            job.run_all({"hangs": python("import time; time.sleep(600)")}, seconds=1)

        steps = {"hang": (hang, 1), "after": (say("hello"), 1)}
        status, found = carry_out(gpu, immortal, tmp_path, **steps)
    assert status == 1
    assert found["after"]["status"] == "passed"
    why = found["hang"]["runs"]["hangs"]["why"]
    (pid,) = map(
        int, re.fullmatch(r"could not be killed: processes \[(\d+)(?:, \1)?\]", why).groups()
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


LOCKS = """
import os, time
pair = os.environ["CUDA_VISIBLE_DEVICES"]
os.close(os.open(pair, os.O_CREAT | os.O_EXCL))
time.sleep(0.3)
os.unlink(pair)
print("had", pair)
"""


def test_jobs_of_two_ranks_share_no_gpu(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.bench, "cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0")
    pairs = gpu.steps.pairs_of_gpus(5)
    assert pairs == ["7,5", "3,1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu.steps.pairs_of_gpus(4) == ["0,1", "2,3"]

    def run(job):
        job.run_all({str(i): python(LOCKS) for i in range(4)}, expects="had", visible=pairs)

    status, steps = carry_out(gpu, monkeypatch, tmp_path, run=(run, 1))
    assert status == 0
    assert {run["lines"] for run in steps["run"]["runs"].values()} == {"had 7,5", "had 3,1"}


def test_two_ranks_are_given_pairs(gpu, monkeypatch, tmp_path):
    """With four GPUs: no script gets more than two of them, no two scripts at a time the same."""
    given = []
    args = SimpleNamespace(count=4, device="cuda")
    job = SimpleNamespace(args=args, is_tiny=False, leave_out=lambda name, why: None)
    job.run_all = lambda commands, **how: given.append(how["visible"])
    monkeypatch.setattr(gpu.bench, "cores", lambda: 8)
    monkeypatch.setattr(gpu.steps.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu.steps.two_ranks(job)
    assert given == [["0,1", "2,3"]]


@pytest.mark.parametrize("is_tiny", [False, True])
def test_on_two_nodes_the_report_has_the_numbers_of_the_node_that_prints(gpu, is_tiny):
    args = SimpleNamespace(count=8, nodes=2, host="HOST", device="cuda")
    told = {}
    job = SimpleNamespace(args=args, is_tiny=is_tiny)
    job.run = lambda name, *command, **how: told.__setitem__(name, (command, how))
    gpu.steps.ranks(job)
    assert list(told) == ["equivalence", "all_reduce bandwidth", "scaling"]
    for command, how in told.values():
        assert command[:4] == (sys.executable, "-m", "torch.distributed.run", "--nnodes=2")
        assert how["must"] is False
    assert told["all_reduce bandwidth"][1]["expects"] == "^all_reduce "


def test_a_line_that_need_not_come_is_recorded(gpu, monkeypatch, tmp_path):
    def run(job):
        for text in ("all_reduce 1 GB", "nothing"):
            job.run(text, *python(f"print({text!r})"), expects="^all_reduce ", must=False)

    status, steps = carry_out(gpu, monkeypatch, tmp_path, run=(run, 1))
    assert status == 0
    runs = steps["run"]["runs"]
    assert [run["lines"] for run in runs.values()] == ["all_reduce 1 GB", ""]


@pytest.mark.parametrize(("text", "is_failure"), [('[{"cat": "kernel"}]', False), ("[{}]", True)])
def test_a_trace_without_kernels_fails(gpu, tmp_path, text, is_failure):
    rows = {}

    def run(name, *command):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trace_0.json").write_text(text)

    args = SimpleNamespace(device="cuda", count=1)
    job = SimpleNamespace(args=args, is_tiny=False, folder=tmp_path, run=run, note=rows.update)
    with pytest.raises(gpu.steps.Failed, match="has no kernel") if is_failure else nullcontext():
        gpu.steps.traces(job)
    assert rows["ddp_basics/trace_0.json.gz"]["kernels"] == int(not is_failure)


def test_a_step_that_fails_gives_status_1_and_the_end_of_its_output(gpu, monkeypatch, tmp_path):
    def fail(job):
        code = "import sys; print('x' * 5000); print('the last line'); sys.exit(3)"
        job.run_all({"bad": python(code), "good": python("print('good')")}, at_once=2)

    def raise_error(job):
        raise ValueError("not a command, but the step")

    silent = (lambda job: job.run("silent", *python("print('else')"), expects="on cuda"), 1)
    status, steps = carry_out(
        gpu,
        monkeypatch,
        tmp_path,
        fail=(fail, 1),
        raises=(raise_error, 1),
        silent=silent,
        good=(say("hello | you"), 1),
    )
    assert status == 1
    runs = steps["fail"]["runs"]
    assert runs["bad"]["why"] == "ended with status 3"
    assert runs["bad"]["output"].endswith("the last line\n")
    assert len(runs["bad"]["output"]) == 3000
    assert runs["good"]["status"] == "passed"
    assert steps["raises"]["reason"] == "ValueError: not a command, but the step"
    assert "printed no line with on cuda" in steps["silent"]["reason"]
    assert steps["good"]["runs"]["says"]["lines"] == "hello | you"
    assert "| says | passed |" in (tmp_path / "gpu.md").read_text()
    assert "hello \\| you" in (tmp_path / "gpu.md").read_text()  # a cell of the table
    page = (tmp_path / "gpu.md").read_text()
    assert re.search(r"bad ended with status 3\. Its last lines:\n\n~+text\nx+\nthe last", page)
    assert "good ended" not in page


@pytest.mark.parametrize("passes", [True, False])
def test_a_run_with_a_failed_step_leaves_the_page_of_results(gpu, monkeypatch, tmp_path, passes):
    """Which may be of another GPU, and written by hand."""
    results, page = tmp_path / "results", tmp_path / "results/gpu.md"
    results.mkdir()
    page.write_text("by hand")
    monkeypatch.setattr(gpu.bench, "RESULTS", results)
    monkeypatch.setattr(gpu.steps.torch.cuda, "device_count", lambda: 1)
    step = say("hello") if passes else lambda job: job.run("bad", *python("raise ValueError"))
    flags = ("--device", "cuda")
    status, _ = carry_out(gpu, monkeypatch, tmp_path / "out", *flags, only=(step, 1))
    assert status == (0 if passes else 1)
    assert ("by hand" in page.read_text()) == (not passes)


def test_only_some_steps(gpu, monkeypatch, tmp_path):
    steps = {"one": (say("1"), 1), "two": (say("2"), 1), "three": (say("3"), 1)}
    status, found = carry_out(gpu, monkeypatch, tmp_path, "--only", "three", "one", **steps)
    assert (status, list(found)) == (0, ["three", "one"])


def test_only_adds_to_the_report_of_an_earlier_run(gpu, monkeypatch, tmp_path):
    """Whose failure is not this run's."""

    def fail(job):
        raise ValueError("failed")

    steps = {"one": (fail, 1), "two": (say("old"), 1), "three": (say("3"), 8)}
    assert carry_out(gpu, monkeypatch, tmp_path, **steps)[0] == 1
    day = read(tmp_path)["date"]
    steps["two"] = (say("new"), 1)
    flags = ("--only", "three", "two", "--minutes", "1")
    status, found = carry_out(gpu, monkeypatch, tmp_path, *flags, **steps)
    assert status == 0
    assert [step["status"] for step in found.values()] == ["failed", "passed", "passed"]
    assert [found[name]["runs"]["says"]["lines"] for name in ("two", "three")] == ["new", "3"]
    _, one, two, three = (tmp_path / "gpu.md").read_text().split("\n## ")
    assert f"failed: ValueError: failed, on {day}\n" in one
    assert f"on {day}" not in two
    assert f"passed, on {day}\n" in three  # --minutes left it out: its result stays
    # without --only the report is a new one
    _, found = carry_out(gpu, monkeypatch, tmp_path, two=steps["two"])
    assert list(found) == ["two"]


def test_only_does_not_add_to_the_report_of_another_machine(gpu, monkeypatch, tmp_path, capsys):
    carry_out(gpu, monkeypatch, tmp_path, one=(say("1"), 1))
    file = tmp_path / "gpu.json"
    other = file.read_text().replace(gpu.bench.machine(), "an H100")
    file.write_text(other)
    status, _ = carry_out(gpu, monkeypatch, tmp_path, "--only", "one", one=(say("2"), 1))
    assert status == 2
    assert file.read_text() == other
    assert "gpu.json is of a run with machine 'an H100', not " in capsys.readouterr().err
    status, _ = carry_out(gpu, monkeypatch, tmp_path, one=(say("2"), 1))
    flags = ("--only", "one", "--sizes", "tiny")
    status, found = carry_out(gpu, monkeypatch, tmp_path, *flags, one=(say("3"), 1))
    assert status == 2
    assert found["one"]["runs"]["says"]["lines"] == "2"
    assert "of a run with sizes 'full', not 'tiny', and --only adds" in capsys.readouterr().err


def test_cores_are_those_that_this_process_may_use(gpu):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert gpu.bench.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_minutes_leave_out_what_costs_most(gpu, monkeypatch, tmp_path):
    steps = {"long": (say("no"), 8), "short": (say("1"), 1), "middle": (say("2"), 2)}
    status, found = carry_out(gpu, monkeypatch, tmp_path, "--minutes", "4", **steps)
    assert status == 0
    assert [step["status"] for step in found.values()] == ["left out", "passed", "passed"]
    assert found["long"]["reason"] == "does not fit into 4 minutes"


def test_what_does_not_fit_takes_no_time_from_what_does(gpu, monkeypatch, tmp_path):
    names = ["one", "three", "five", "two devices"]
    minutes, needs_two = dict(zip(names, (1, 3, 5, 4), strict=True)), {"two devices"}
    steps = {n: gpu.Step(say(n), minutes[n], n, needs_two=n in needs_two) for n in names}
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu.steps.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "9"])
    assert gpu.parse_args().skipped == set()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "7"])
    assert gpu.parse_args().skipped == {"five"}
    monkeypatch.setattr(gpu.steps.torch.cuda, "device_count", lambda: 2)
    assert gpu.parse_args().skipped == {"two devices", "five"}


def test_without_a_package_its_tests_are_left_out(gpu, choice, monkeypatch, tmp_path):
    for module in (gpu.steps, choice):
        monkeypatch.setattr(module, "has", lambda name: name not in ("pytest", "transformers"))
    steps = {"tests": (gpu.steps.tests, 1), "scripts": (gpu.steps.scripts, 1)}
    monkeypatch.setattr(gpu.steps, "scripts_with_device", lambda: ["t5_finetuning/train.py"])
    status, found = carry_out(gpu, monkeypatch, tmp_path, **steps)
    assert status == 0
    assert found["tests"]["status"] == "left out"
    assert "pytest" in found["tests"]["reason"]
    [run] = found["scripts"]["runs"].values()
    assert run == {"status": "left out", "lines": "transformers is not installed"}


def test_a_script_without_device_is_left_out_on_a_cpu(gpu, choice, monkeypatch, tmp_path):
    names = (choice.ONLY_CUDA, "transformer_basics/generate.py")
    monkeypatch.setattr(gpu.steps, "scripts_with_device", lambda: names)
    status, found = carry_out(gpu, monkeypatch, tmp_path, scripts=(gpu.steps.scripts, 1))
    assert status == 0
    reasons = [run["lines"] for run in found["scripts"]["runs"].values()]
    assert reasons == ["needs one rank on a CUDA device", choice.OTHERWISE[names[1]]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_all_processes_and_keeps_what_was_measured(tmp_path, number):
    """SIGKILL, too, although gpu.py then has no time to write what it measured."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\nimport gpu\n"
        f"hangs = (sys.executable, '-c', {HANGS!r})\n"
        "gpu.STEPS = {'hang': gpu.Step(lambda job: job.run('hangs', *hangs), 9, '')}\n"
        "gpu.main()\n"
    )
    log = tmp_path / "out/hang/hangs.log"
    flags = ("--device", "cpu", "--output-dir", tmp_path / "out")
    # A fork would say its end by SIGINT in another way.
    fork = number != signal.SIGINT
    command = [driver, *flags] if fork else [sys.executable, driver, *flags]
    with Job(command, fork=0 if fork else None) as job:
        job.wait_until(lambda: log.exists() and "child" in log.read_text())
        assert read(tmp_path / "out")["steps"]["hang"]["status"] == "running"
        job.process.send_signal(number)
        ended = job.wait(60).returncode
        assert ended in (128 + number, -number)  # Python ends itself by SIGINT
        job.leaders.clear()  # what is left has the mark, in sessions of its own
        assert not job.left_running()
    step = read(tmp_path / "out")["steps"]["hang"]
    if number == signal.SIGKILL:
        assert step["status"] == "running"
        return
    assert (step["status"], step["reason"]) == ("failed", "interrupted")
    assert step["rows"] == {"row": {"value": 1.5}}


def test_a_folder_with_other_files_is_refused(tmp_path):
    """--output-dir . in a clone would empty its tests/."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mine.py").write_text("mine")
    result = helpers.python(SCRIPT, "--device", "cpu", "--minutes", 0, "--output-dir", tmp_path)
    assert result.returncode == 2
    assert f"--output-dir {tmp_path} has other files" in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["tests", "mine.py"]


def test_a_step_that_is_left_out_keeps_what_an_earlier_run_wrote(gpu, monkeypatch, tmp_path):
    steps = {"long": (say("1"), 8), "short": (say("2"), 1)}
    carry_out(gpu, monkeypatch, tmp_path, **steps)
    _, found = carry_out(gpu, monkeypatch, tmp_path, "--minutes", "1", **steps)
    assert [step["status"] for step in found.values()] == ["left out", "passed"]
    assert (tmp_path / "long/says.log").read_text() == "1\n"


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(gpu, monkeypatch, tmp_path):
    def run_again(job):
        flags = ("--device", "cpu", "--minutes", 0, "--output-dir", tmp_path)
        job.run("again", sys.executable, SCRIPT, *flags)

    status, steps = carry_out(gpu, monkeypatch, tmp_path, run=(run_again, 2))
    assert status == 1
    assert "another run writes to" in steps["run"]["runs"]["again"]["output"]


def test_a_full_disk_costs_the_report_and_no_step(gpu, monkeypatch, tmp_path, capsys):
    ran = []

    def fill(job):
        def refuse(path, text):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(gpu.Path, "write_text", refuse)
        raise ValueError("full")

    monkeypatch.setattr(gpu, "STEPS", {
        "fill": gpu.Step(fill, 1, "Fill"),
        "after": gpu.Step(lambda job: ran.append("after"), 1, "After"),
    })  # fmt: skip
    arguments = ["gpu.py", "--device", "cpu", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        gpu.main()
    assert ran == ["after"]
    said = capsys.readouterr().out
    assert "cannot write gpu.md: [Errno 28] No space left on device" in said
    assert "## After" in said  # the report is printed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--only", "nothing"), "invalid choice: 'nothing'"),
        (("--device", "cpu", "--nodes", 2), "--nodes N and --host NAME go together"),
        (("--minutes", "many"), "invalid float value: 'many'"),
    ],
)
def test_wrong_flags(flags, says, tmp_path):
    result = helpers.python(SCRIPT, *flags, "--output-dir", tmp_path / "out")
    assert result.returncode == 2
    assert says in result.output
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_it_says_what_to_do():
    result = helpers.python(SCRIPT, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "finds no CUDA device here; to rehearse: --device cpu --sizes tiny" in result.output


def test_files_with_tests_for_gpus_are_found(gpu):
    names = [path.name for path in gpu.steps.test_files("gpu")]
    assert {"test_gpu.py", "test_ddp_basics.py"} <= set(names)  # a mark of a parameter, of a test
    assert "test_rpc_basics.py" not in names
    assert "test_parallel_basics_tied.py" in [path.name for path in gpu.steps.test_files("device")]


def test_scripts_with_device_are_found(choice):
    found = set(choice.scripts_with_device())
    assert {"ddp_basics/train.py", "ddp_basics/minimal.py", "custom_backend/layers.py"} <= found
    assert "parallel_basics/tensor_parallel.py" in found  # its flags are in comparing.py
    assert not {"rpc_basics/minimal.py", "benchmarks/gpu.py", "ddp_basics/config.py"} & found
    known = {*choice.RANKS, *choice.GPUS_PER_RANK, *choice.OTHERWISE, *choice.SHORT}
    assert known <= found
    templates = {name for name in found if name.endswith("/train.py")}
    assert templates <= choice.SHORT.keys()  # else they train to the end


def test_scripts_that_need_more_ranks_or_gpus_are_left_out(choice):
    split = "ddp_basics/ddp_with_model_parallel.py"
    assert choice.why_not(split, "cuda", ranks=1, gpus=1) == "needs 2 GPUs per rank"
    assert choice.why_not(split, "cuda", ranks=1, gpus=2) == ""
    assert choice.why_not(split, "cuda", ranks=2, gpus=2) == "needs 2 GPUs per rank"
    assert choice.why_not("collectives/hangs.py", "cuda", ranks=1, gpus=1) == "needs 2 ranks"
    assert choice.why_not("collectives/hangs.py", "cuda", ranks=2, gpus=2) == ""


@pytest.mark.release
def test_the_rehearsal_passes_without_a_gpu(tmp_path):
    """On two emulated GPUs, or on the CPU where these are not installed."""
    python, device = (EMULATED, "cuda") if HAS_EMULATED else (sys.executable, "cpu")
    results = sorted(path.name for path in (BENCHMARKS / "results").iterdir())
    out = tmp_path / "out"
    flags = ("--device", device, "--sizes", "tiny", "--output-dir", out)
    with Job([python, SCRIPT, *flags], EMULATED_GPUS="2") as job:
        job.wait(600).check()
        assert not job.left_running()
    found = {name: step["status"] for name, step in read(out)["steps"].items()}
    assert found.pop("two-ranks") == "left out"
    assert set(found.values()) == {"passed"}, found
    page = (out / "gpu.md").read_text()
    for step in (
        "environment",
        "numbers",
        "checkpoints",
        "speed",
        "offload",
        "traces",
        "kernels",
        "ranks",
    ):
        assert read(out)["steps"][step]["rows"], step
    assert "| fp32, 3 steps |" in page
    assert "| pp=2 |" in page
    assert list((out / "traces").glob("*/trace_0.json.gz"))
    assert results == sorted(path.name for path in (BENCHMARKS / "results").iterdir())
    shutil.rmtree(out)
