"""clusters/elastic_train.py: any number of ranks computes the same, while hosts come and go."""

import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise

import lab_hosts
import numpy
import pool
import pytest
import torch
from helpers import ROOT, TORCHRUN, Job, Patience, learned, python, read_lines
from lab_hosts import Lab, name_of

SCRIPT = ROOT / "clusters/elastic_train.py"
TEMPLATE = ROOT / "ddp_basics/train.py"


def log(folder) -> list[dict]:
    return read_lines(folder / "log.jsonl")


def state(folder) -> dict:
    return torch.load(folder / "state.pt", weights_only=True)


def assert_same_run(actual, expected, tolerance: float) -> None:
    """Each loss, the parameters, the momentum: what is left of all gradients. In fp32 sums in
    another order differ in the last bits, which steps let grow."""
    losses, right = ({line["step"]: line["loss"] for line in log(f)} for f in (actual, expected))
    assert losses == pytest.approx(right, abs=tolerance)
    a, b = state(actual), state(expected)
    assert a["step"] == b["step"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=tolerance)
    torch.testing.assert_close(
        a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=tolerance
    )


@pytest.mark.slow
def test_any_number_of_ranks_computes_the_same(tmp_path):
    """5 ranks have 3, 3, 2, 2 and 2 of the 12 parts."""
    for ranks in (1, 5):
        args = ("--steps", 30, "--output-dir", tmp_path / str(ranks))
        pool.run(SCRIPT, *args, ranks=ranks, timeout=120).check()
    assert_same_run(tmp_path / "5", tmp_path / "1", tolerance=1e-5)


WRAPPER = """
import os, resource, runpy, signal, sys, time
sys.argv[0] = {script!r}
sys.path.insert(0, os.path.dirname({script!r}))
{before}
runpy.run_path({script!r}, run_name="__main__")
"""


def wrapped(tmp_path, before: str, script=SCRIPT):
    wrapper = tmp_path / f"wrapper_{script.parent.name}.py"
    wrapper.write_text(WRAPPER.format(script=str(script), before=before))
    return wrapper


def test_a_full_disk_keeps_the_state_before(tmp_path):
    """A limit on the size of files stands in for it."""
    args = ("--output-dir", tmp_path)
    pool.run(SCRIPT, *args, "--steps", 20, timeout=120).check()
    before = (tmp_path / "state.pt").read_bytes()
    limit = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    )
    result = pool.run(wrapped(tmp_path, limit), *args, "--steps", 40, timeout=120)
    assert result.returncode == 1
    assert f"elastic_train.py: error: cannot write {tmp_path}/state.pt, it is as it was:" in (
        result.output
    )
    assert (tmp_path / "state.pt").read_bytes() == before
    assert not (tmp_path / "state.tmp").exists()


def test_held_steps_are_longer(tmp_path):
    """What gives the chapter time to start and to lose a host."""
    (tmp_path / "hold").touch()
    args = ("--steps", 5, "--output-dir", tmp_path, "--hold", tmp_path / "hold")
    pool.run(SCRIPT, *args, timeout=120).check()
    times = [line["time"] for line in log(tmp_path)]
    assert len(times) == 5
    assert all(after - before >= 0.1 for before, after in pairwise(times))


def test_ranks_of_two_jobs_do_not_train_together(tmp_path):
    """What two jobs with one --rdzv-id come to: an agent takes the other's rank into its job."""
    other = 'sys.argv += ["--steps", "40" + os.environ["RANK"]]'
    result = pool.run(wrapped(tmp_path, other), ranks=2, timeout=120)
    assert result.returncode == 1
    assert (
        "elastic_train.py: error: not one job: 400 steps from 0 in None and 401 steps from 0 in "
        "None: two jobs with one --rdzv-id"
    ) in result.output


def test_more_ranks_than_parts(tmp_path):
    result = python(SCRIPT, timeout=60, WORLD_SIZE="13")
    assert result.returncode == 2
    assert "elastic_train.py: error: a step has 12 micro-batches: at most 12 ranks" in result.output


# ---- hosts of the lab


@pytest.mark.release
def test_a_disk_of_a_host_that_is_really_full(tmp_path):
    """Two ranks under torchrun, on a host whose disk holds a megabyte. Nothing saved is lost."""
    run, whole, copy = (tmp_path / name for name in ("run", "whole", "copy"))
    run.mkdir()
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    with lab_hosts.up(Lab(name_of("disk")), 1) as lab:

        def train(steps):
            with lab.start(0, *torchrun, SCRIPT, "--output-dir", run, "--steps", steps) as job:
                return job.wait(timeout=200)

        lab.on(0, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", run)
        train(steps=20).check()
        before = lab.on(0, "sha256sum", run / "state.pt").output
        lab.run("exec", 0, "--", "dd", "if=/dev/zero", f"of={run / 'other'}", "bs=1k")
        result = train(steps=60)
        assert result.returncode == 1
        assert f"elastic_train.py: error: cannot write {run}/" in result.output
        assert "No space left on device" in result.output
        assert lab.on(0, "sha256sum", run / "state.pt").output == before
        lab.on(0, "rm", run / "other")
        said = train(steps=60).check().output
        assert "2 rank(s), from step 20 of 60" in said
        lab.on(0, "cp", "-r", run, copy)
    first = ("--steps", 20, "--output-dir", whole)  # its learning rate falls to 0 by step 20
    for args in (first, ("--steps", 60, "--output-dir", whole)):
        pool.run(SCRIPT, *args, ranks=2, timeout=120).check()
    assert_same_run(copy, whole, tolerance=0)


class Hosts(Lab):
    """Three hosts, and a job that has an agent on those of them that there are."""

    def __init__(self, name: str, folder):
        super().__init__(name)
        self.folder, self.agents, self.all = folder, {}, []
        self.seen = []
        # While the file is there a job takes longer to end than wait_for may take three times, and
        # soon has done the steps that wait_for waits for: from its 10th on a step takes a second.
        (folder / "hold").touch()
        hold = (
            "from itertools import count\n"
            "from torch.optim import SGD\n"
            "step, done = SGD.step, count()\n"
            "def slowly(*args, **more):\n"
            f"    if os.path.exists({str(folder / 'hold')!r}):\n"
            "        time.sleep(0.2 if next(done) < 10 else 1)\n"
            "    return step(*args, **more)\n"
            "SGD.step = slowly"
        )
        # Some forty ranks start in this file: without scikit-learn in half of the processor time.
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        numpy.savez(folder / "digits.npz", images=images, labels=labels)
        digits = (
            "import numpy, types\n"
            f"arrays = numpy.load({str(folder / 'digits.npz')!r})\n"
            "sys.modules['sklearn.datasets'] = types.SimpleNamespace(\n"
            "    load_digits=lambda return_X_y: (arrays['images'], arrays['labels']))\n"
        )
        self.scripts = {
            SCRIPT: wrapped(folder, digits + hold),
            TEMPLATE: wrapped(folder, hold, TEMPLATE),
        }

    def start_agent(self, host: int, *more, restarts: int = 100, script=SCRIPT) -> Job:
        torchrun = [*TORCHRUN, "--nnodes=1:3", "--nproc-per-node=1", f"--max-restarts={restarts}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=host0:29500", "--rdzv-id=elastic"]
        # An agent that is silent for 6 s counts as lost: 3 s are too short for a busy machine. Who
        # waits for the agents' meeting looks once a second whether it has begun: one of 1 s would
        # miss some, and they start again.
        conf = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=6"
        torchrun += [f"--rdzv-conf={conf}", self.scripts[script]]
        torchrun += ["--output-dir", self.folder / "run"]
        command = (*torchrun, "--timeout", 10, *more)
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.agents[host] = self.start(host, *command, **environment)
        self.all.append(self.agents[host])
        return self.agents[host]

    def wait_for(self, ranks: int, steps: int = 5, since: float = 0) -> dict:
        """Wait until `ranks` ranks have done `steps` steps; returns the first step."""

        def done() -> list[dict]:
            lines = [x for x in log(self.folder / "run") if x["time"] > since]
            return [x for x in lines if x["ranks"] == ranks]

        self.wait_until(lambda: len(done()) >= steps)
        return done()[0]

    def wait_until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Raises AssertionError if no agent and no rank makes progress for so many seconds."""
        patience = Patience(self.all, seconds)
        while not condition():
            if patience.is_over():
                for job in self.agents.values():
                    job.abort()  # each process says what it was doing
                said = (f"host{i}: {job.output[-9000:]}" for i, job in self.agents.items())
                raise AssertionError("\n".join([patience.why, *said]))
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """The last lines of the tracebacks of ranks since the last call, without addresses."""
        pattern = r"^(?:\[rank\d\]: )?(\w*Error: .*|\w+\.py: error.*)"
        found = [x for job in self.all for x in re.findall(pattern, job.output, re.MULTILINE)]
        new = [re.sub(r"\[[^]]*\]", "[...]", line) for line in found if line not in self.seen]
        self.seen += found
        return new

    def end(self) -> None:
        """Let the job run to its end at full speed."""
        (self.folder / "hold").unlink()
        for job in self.agents.values():
            job.wait(120).check()


@pytest.fixture
def hosts(tmp_path):
    with lab_hosts.up(Hosts(name_of("elastic"), tmp_path), 3) as hosts:
        yield hosts
        for job in hosts.all:
            job.kill()
            job.log.close()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The folder of an undisturbed run of one process."""
    folder = tmp_path_factory.mktemp("one_process")
    python(SCRIPT, "--output-dir", folder, timeout=200).check()
    return folder


def reported(hosts: Hosts, what: str, since: float, line: dict) -> None:
    print(f"{what}: {line['time'] - since:.1f} s to the next step, {line['step']}")
    for said in hosts.errors():
        print(f"    {said}")


@pytest.mark.release
def test_hosts_come_and_go(hosts, tmp_path, one_process):
    """One host begins, two join, one is lost; each loss and the end are those of one process."""
    hosts.start_agent(0)
    hosts.wait_for(ranks=1)
    for host in (1, 2):
        since = time.time()
        hosts.start_agent(host)
        reported(hosts, f"host{host} joins", since, hosts.wait_for(ranks=host + 1))
    steps = [line["step"] for line in log(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))  # to join costs no step: they are saved first
    since = time.time()
    hosts.agents.pop(1).kill()  # agent and rank at once
    reported(hosts, "host1 is lost", since, hosts.wait_for(ranks=2, since=since))
    hosts.end()
    lines = log(tmp_path / "run")
    assert {line["ranks"] for line in lines} == {1, 2, 3}
    # Those since the last save, which is never longer ago.
    repeated = len(lines) - len({line["step"] for line in lines})
    assert repeated <= 20
    assert_same_run(tmp_path / "run", one_process, tolerance=1e-4)


@pytest.mark.release
def test_the_template_goes_on_with_any_number_that_divides_its_batch(hosts, tmp_path):
    """ddp_basics/train.py as it is: one host, then three, then two."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    args = ("--batch-size", 60, "--epochs", 3, "--checkpoint-every", 5, "--log-every", 1)
    args += ("--optimizer", "sgd", "--lr", 0.05)

    def starts(ranks: int) -> int:
        return sum(job.output.count(f"{ranks} rank(s) on cpu") for job in hosts.all)

    def wait_for(ranks: int, before: int) -> None:
        """Wait until `ranks` ranks have started again, and have done three steps."""
        hosts.wait_until(lambda: starts(ranks) > before)
        done = len(learned(run))
        hosts.wait_until(lambda: len(learned(run)) >= done + 3)

    for together, ranks in (((0,), 1), ((1, 2), 3)):
        for host in together:
            hosts.start_agent(host, *args, script=TEMPLATE)
        wait_for(ranks, before=0)
    before = starts(ranks=2)
    hosts.agents.pop(1).kill()
    wait_for(2, before)
    hosts.end()

    pool.run(TEMPLATE, *args, "--output-dir", whole, timeout=120).check()
    actual, expected = learned(run), learned(whole)
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for name in ("loss", "lr", "grad_norm", "test_loss"):
        a, b = ([line[name] for line in lines if name in line] for lines in (actual, expected))
        assert a == pytest.approx(b, abs=1e-4), name
    ends = [torch.load(d / "checkpoints/step_00000069.pt", weights_only=True) for d in (run, whole)]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ends[0][part], ends[1][part], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_killed_ranks_agents_and_hosts_cost_time_only(hosts, tmp_path, one_process):
    """One job on two hosts, and one kill -9 after the other."""
    hosts.start_agent(0)
    hosts.start_agent(1)
    hosts.wait_for(ranks=2)

    since = time.time()
    rank = next(
        p for job in hosts.agents.values() for p in job.ranks() if p.environ()["RANK"] == "1"
    )
    rank.kill()
    reported(hosts, "a rank is killed", since, hosts.wait_for(ranks=2, since=since))

    # Its rank goes on without it. A new agent joins: all leave together, the orphan too.
    (orphan,) = hosts.agents[1].ranks()
    since = time.time()
    (agent,) = hosts.agents[1].agents()
    agent.kill()
    hosts.wait_for(ranks=2, since=since)
    assert orphan.is_running()
    hosts.start_agent(1)
    hosts.wait_until(lambda: not orphan.is_running())
    reported(
        hosts,
        "an agent is killed, and started again",
        since,
        hosts.wait_for(ranks=2, since=time.time()),
    )

    # Where the agents meet: without it they cannot agree on anything, and the job ends.
    since = time.time()
    hosts.agents.pop(0).kill()
    other = hosts.agents.pop(1)
    result = other.wait(120)
    print(f"the first host is killed: the other agent ends after {time.time() - since:.1f} s")
    assert result.returncode == 1
    assert "RendezvousConnectionError: The connection to the C10d store has failed" in result.output
    assert not other.kill()  # nor is its rank left
    hosts.start_agent(0)
    hosts.start_agent(1)
    since = time.time()
    reported(hosts, "the same commands again", since, hosts.wait_for(ranks=2, since=since))
    hosts.end()
    assert_same_run(tmp_path / "run", one_process, tolerance=1e-4)


@pytest.mark.release
def test_two_jobs_with_one_id(hosts, tmp_path, one_process):
    """The second one's agent joins the first one's job: its ranks find out before they train. An
    agent that has no restarts left closes the rendezvous for all, so both jobs end."""
    hosts.start_agent(0)
    hosts.wait_for(ranks=1)
    since = time.time()
    hosts.start_agent(1, "--steps", 500, restarts=0)
    assert [job.wait(120).returncode for job in hosts.all] == [1, 1]
    print(f"another job comes: both end after {time.time() - since:.1f} s")
    said = [job.output for job in hosts.all]
    assert "elastic_train.py: error: not one job: 400 steps from" in "".join(said)
    assert "RendezvousClosedError" in said[0]
    assert state(tmp_path / "run")["step"] == log(tmp_path / "run")[-1]["step"]  # nothing lost
    hosts.agents.clear()
    hosts.start_agent(0)
    hosts.end()
    assert_same_run(tmp_path / "run", one_process, tolerance=1e-4)


@pytest.mark.release
def test_a_link_and_a_host_that_stand_still_cost_time_only(hosts, tmp_path, one_process):
    """A collective waits 10 s for the missing: --timeout. TCP sends again 3 s after the cut, then
    after 6 s, then after 12 s: a cut of 5 s was too long if the machine took a second to end it."""
    agents = [hosts.start_agent(0), hosts.start_agent(1)]
    hosts.wait_for(ranks=2)

    def attempts() -> int:
        return sum(job.output.count("rank(s), from step") for job in agents)

    before, since = attempts(), time.time()
    hosts.run("cut", 1)
    time.sleep(2)  # the fault itself
    hosts.run("heal", 1)
    reported(hosts, "a cable is cut for 2 s", since, hosts.wait_for(ranks=2, since=time.time()))
    assert attempts() == before  # TCP retransmits: no process notices

    frozen = agents[1].processes()
    since = time.time()
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    reported(hosts, "a host is frozen", since, hosts.wait_for(ranks=1, since=since))
    since = time.time()
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    reported(hosts, "it thaws", since, hosts.wait_for(ranks=2, since=since))

    hosts.run("cut", 1)
    since = time.time()
    reported(hosts, "a cable is cut", since, hosts.wait_for(ranks=1, since=since))
    hosts.run("heal", 1)
    since = time.time()
    reported(hosts, "it is healed", since, hosts.wait_for(ranks=2, since=since))

    for line in ("ip route add blackhole 10.77.0.1/32", "ip -6 route add blackhole fd77::1/128"):
        hosts.run("exec", 1, "--", *line.split())
    since = time.time()
    reported(hosts, "host1 hears and is not heard", since, hosts.wait_for(ranks=1, since=since))
    hosts.agents.pop(1).kill()
    hosts.end()
    assert_same_run(tmp_path / "run", one_process, tolerance=1e-4)
