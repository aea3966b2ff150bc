"""clusters/goodput.py: the formulas against an exact optimum, dice, and killed processes."""

import json
import math
import re
import statistics
import sys
from itertools import pairwise

import pytest
from helpers import ROOT, Job, python, torchrun_command

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


@pytest.mark.slow
def test_processes_that_are_killed_agree():
    """A sleep is never shorter than asked for: nothing is gained over what is on paper. It may be
    longer on a busy machine, hence only half of that is asked for."""
    said = python(SCRIPT, "--measure", 4, timeout=60).check().output
    kills = int(re.search(r"^(\d+) kills in", said)[1])
    measured, on_paper, _ = (float(number) for number in re.findall(r"([\d.]+)%", said))
    assert kills == len(random_failures(1.0, 4, seed=0)) > 0
    assert on_paper / 2 < measured <= on_paper


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
    """200 steps, saved every 20; twice a rank is killed halfway between two saves. replay() is told
    when, and how long a step and a restart took. It may be wrong by the last interval, because
    steps do not all take equally long."""
    script, path = tmp_path / "slowly.py", tmp_path / "log.jsonl"
    script.write_text(SLOWLY.format(script=str(ROOT / "clusters/elastic_train.py")))
    args = ("--steps", 200, "--save-every", 20, "--output-dir", tmp_path)
    with Job(torchrun_command(script, *args, options=("--max-restarts=2",)), **FRESH_STORE) as job:
        for step in (50, 130):
            job.wait_until(
                lambda step=step: path.exists() and f'"step": {step},' in path.read_text()
            )
            job.ranks()[1].kill()
        job.wait(200).check()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ordinary, restarts, failures = [], [], []
    for last, line in pairwise(lines):
        pause = line["time"] - last["time"]
        if line["step"] == last["step"] + 1:
            ordinary.append(pause)
        else:
            restarts.append(pause)
            failures.append(last["time"])
    step = statistics.mean(ordinary)
    begin, end = lines[0]["time"] - step, lines[-1]["time"] + step / 2
    restart = statistics.mean(restarts) - step
    interval, failures = 20 * step, [failure - begin for failure in failures]
    assert len(failures) == 2
    assert abs(replay(failures, interval, 0, restart, end - begin) - 200 / 20) <= 1
    assert len(lines) - 200 <= 2 * 20  # steps done twice
    print(f"step {step:.3f} s, restarts {restarts} s, goodput {200 * step / (end - begin):.1%}")


@pytest.mark.slow
def test_the_table():
    said = python(SCRIPT, timeout=30).check().output.splitlines()
    assert said[0].startswith("one GPU fails every 50,677 h")
    assert [line[:6].strip() for line in said[4:]] == [f"{4**power:,}" for power in range(2, 8)]
    assert " ".join(said[-1].split()) == "16,384 3.1 h 19.3 18.6 87.6% 80.9% 2,034.4"


def test_mistakes_are_one_sentence():
    result = python(SCRIPT, "--save", -1, timeout=30)
    assert result.returncode == 2
    assert result.output.endswith("error: argument --save: '-1' must be a number above 0\n")
