"""clusters/goodput.py: the formulas against an exact optimum, Monte Carlo, and killed processes."""

import itertools
import json
import math
import multiprocessing
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import ROOT, Torchrun, python

sys.path.insert(0, str(ROOT / "clusters"))
from goodput import daly, goodput, random_failures, replay, young

sys.path.remove(str(ROOT / "clusters"))

SCRIPT = ROOT / "clusters/goodput.py"
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarts meet old addresses


def best(save: float, mtbf: float) -> float:
    """The interval at which goodput() is greatest. Its derivative is zero where, with
    x = (interval + save) / mtbf, x - 1 + exp(-x) = save / mtbf; found by halving."""
    low, high = 0.0, 1 + save / mtbf
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if x - 1 + math.exp(-x) < save / mtbf else (low, x)
    return mtbf * x - save


@pytest.mark.parametrize("ratio", [1e-6, 1e-4, 1e-2, 0.1, 0.5])
def test_daly_is_close_to_the_optimum_and_closer_than_young(ratio):
    """His series leaves out terms of the order of ratio^2, beside an interval of sqrt(2 ratio)."""
    right = best(ratio, 1)
    assert daly(ratio, 1) == pytest.approx(right, rel=ratio**1.5)
    assert abs(daly(ratio, 1) - right) < abs(young(ratio, 1) - right)
    around = [goodput(right * factor, ratio, 0.1, 1) for factor in (0.9, 1, 1.1)]
    assert max(around) == around[1]


def test_what_daly_says_when_a_save_takes_longer_than_a_failure_stays_away():
    assert daly(2.0, 1.0) == 1.0
    assert daly(1.9999, 1.0) == pytest.approx(1.0, rel=0.12)  # nearly no jump


def test_goodput_in_cases_that_one_can_do_by_hand():
    assert goodput(9, 1, 100, mtbf=1e12) == pytest.approx(0.9)  # it never fails: nine in ten
    # Rare failures: what is saved for, half an interval and a restart for each failure.
    rare = 1 - 1 / 100 - (100 / 2 + 10) / 1e5
    assert goodput(99, 1, 10, mtbf=1e5) == pytest.approx(rare, abs=1e-5)
    assert goodput(1, 0, 10, mtbf=1) < 1e-4  # restarting takes ten times as long as it lasts


def test_replay():
    """Intervals of 8 and saves of 2; by 35, when it fails, it has saved 3, and begins at 40."""
    assert replay([], 8, 2, 5, end=39.9) == 3
    assert replay([35], 8, 2, 5, end=60) == 3 + 2
    assert replay([35, 38], 8, 2, 5, end=60) == 3 + 1  # again while it restarts: from 43 on
    assert replay([35, 60], 8, 2, 5, end=41) == 3  # what comes after the end does not count


@pytest.mark.parametrize(
    ("save", "restart", "mtbf"), [(2, 7, 100), (2, 1, 10), (0.02, 0.1, 1), (3, 3, 5)]
)
def test_dice_agree(save, restart, mtbf):
    """20 runs of 2,000 failures: the mean lies within 4 of its standard errors."""
    interval, end = daly(save, mtbf), 2000 * mtbf
    runs = [
        replay(random_failures(mtbf, end, seed), interval, save, restart, end) * interval / end
        for seed in range(20)
    ]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    assert error < 0.002
    assert abs(statistics.mean(runs) - goodput(interval, save, restart, mtbf)) < 4 * error


def durable(failures, interval: float, save: float, delay: float, restart: float) -> int:
    """How many intervals are kept, save by save: one counts if it is durable before the failure."""
    kept, now = 0, 0.0
    for failure in failures:
        snapshot = now + interval + save
        while snapshot + delay <= failure:
            kept, snapshot = kept + 1, snapshot + interval + save
        now = failure + restart
    return kept


@pytest.mark.parametrize("delay", [0, 30, 60])
def test_a_background_save_counts_when_it_is_durable(delay):
    """Dice agree with the formula, in which the restart takes `delay` longer."""
    save, restart, mtbf, interval = 2, 20, 1000, 60
    runs = []
    for seed in range(20):
        failures = random_failures(mtbf, 1000 * mtbf, seed)
        kept = durable(failures, interval, save, delay, restart)
        runs.append(kept * interval / failures[-1])
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    assert error < 0.002
    said = goodput(interval, save, restart + delay, mtbf)
    assert abs(statistics.mean(runs) - said) < 4 * error
    if delay:  # the formula for saves that count at once promises more
        assert said < goodput(interval, save, restart, mtbf) - 0.02


FORK = multiprocessing.get_context("fork")  # no imports again: it starts at once


@pytest.mark.slow
def test_processes_that_are_killed_agree(tmp_path):
    """A process that works, saves and is killed at random. SIGKILL, new processes and the file are
    real; its time comes from a pipe, tick by tick, so that a busy machine changes nothing."""
    mtbf, save, restart, end = 100, 2, 10, 2000
    interval, file = round(daly(save, mtbf)), tmp_path / "saved"
    failures = [round(time) for time in random_failures(mtbf, end, seed=0)]
    for begin, stop in pairwise([0, *failures, end]):
        clock, its_end = FORK.Pipe()
        starts = restart if begin else 0
        process = FORK.Process(target=work, args=(its_end, file, interval + save, starts))
        process.start()
        for _ in range(stop - begin):
            clock.send("tick")
            assert clock.poll(60)
            clock.recv()
        process.kill()
        process.join()
    assert len(failures) > 10
    assert saved_in(file) == replay(failures, interval, save, restart, end) > 20


def work(clock, file: Path, ticks: int, restart: int) -> None:
    """Continue where the last process stopped, and save each time after `ticks` ticks."""
    saved = saved_in(file)
    for tick in itertools.count(1):
        clock.recv()
        if tick > restart and (tick - restart) % ticks == 0:
            saved += 1
            temporary = file.with_suffix(".tmp")
            temporary.write_text(str(saved))
            temporary.replace(file)
        clock.send("done")


def saved_in(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


SLOWLY = """
import runpy, sys, time
from torch.optim import SGD
step = SGD.step
def slowly(*args, **more):
    time.sleep(0.05)
    return step(*args, **more)
SGD.step = slowly
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_training_that_is_killed_agrees(tmp_path):
    """120 steps, saved every 20; a rank is killed halfway between two saves. replay() is told when,
    counted in steps: what they take depends on the machine. The kill may come a save later."""
    script, path = tmp_path / "slowly.py", tmp_path / "log.jsonl"
    script.write_text(SLOWLY.format(script=str(ROOT / "clusters/elastic_train.py")))
    args = ("--steps", 120, "--save-every", 20, "--output-dir", tmp_path)
    with Torchrun(script, *args, options=("--max-restarts=1",), **FRESH_STORE) as job:
        job.wait_until(path.exists)
        rank1 = job.ranks()[1]  # to look for it takes steps, and could take all up to the next save
        job.wait_until(lambda: '"step": 50,' in path.read_text())
        rank1.kill()
        job.wait(200).check()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    failures = [i + 1 for i, (a, b) in enumerate(pairwise(steps)) if b != a + 1]
    assert len(failures) == 1
    assert abs(replay(failures, 20, 0, 0, len(steps)) - 120 / 20) <= 1
    assert 120 < len(steps) <= 120 + 20  # steps done twice


def table(*options) -> list[list[str]]:
    """The words of each line."""
    said = python(SCRIPT, *options, timeout=30).check().output
    return [line.replace(" min", "min").replace(" h ", "h ").split() for line in said.splitlines()]


@pytest.mark.slow
def test_the_table():
    lines = table()
    assert " ".join(lines[3]) == "tuned: 50,677 GPU hours research: 8,090 GPU hours"
    assert [line[0] for line in lines[5:]] == [f"{4**power:,}" for power in range(2, 8)]
    assert lines[8] == ["1,024", "49.5h", "1.3h", "97.3%", "7.9h", "30.1min", "92.7%"]
    assert lines[-1] == ["16,384", "3.1h", "18.6min", "87.6%", "-", "-", "-"]


@pytest.mark.slow
def test_a_background_save_in_the_table():
    """Its write of five minutes is longer than the best interval: the next save waits for it."""
    assert table("--save", 5, "--durable-after", 60)[-1][3] == "94.0%"
    assert table("--save", 5)[-1][3] == "94.5%"
    assert table("--save", 5, "--durable-after", 900)[-1][2] == "14.9min"


def test_mistakes_are_one_sentence():
    result = python(SCRIPT, "--save", 9, "--durable-after", 5, timeout=30)
    assert result.returncode == 2
    assert result.output.endswith("error: --durable-after 5 is less than --save 9\n")
    result = python(SCRIPT, "--save", -1, timeout=30)
    assert result.returncode == 2
    assert result.output.endswith("error: argument --save: '-1' must be a number above 0\n")
