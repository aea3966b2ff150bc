"""notebooks/capstone/: the check passes the solution, and names each mistake in one line.

The ranks are forks (pool.py), but where torchrun itself matters. check.py looks at a script through
hooks, and computes what one process does by hand: it shares no code with the solution.
"""

import re
import subprocess
import sys
from pathlib import Path

import pool
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, clean_environment

FOLDER = ROOT / "notebooks/capstone"
sys.path.insert(0, str(FOLDER))

import check  # noqa: E402
import check_log  # noqa: E402
import mistakes  # noqa: E402
import one_process  # noqa: E402
import oracle  # noqa: E402

SOLUTION = (FOLDER / "solution.py").read_text()


def forked(ranks: int, command: list, environment: dict) -> tuple[int, str, str]:
    """As check.torchrun(), but without torchrun."""
    if ranks == 1:  # pool.run makes a plain process of one rank
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = environment | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    result = pool.run(*command, ranks=ranks, **environment)
    return result.returncode, result.output, ""


def verdict(folder: Path, text: str) -> list[str]:
    """The lines of the check of a script with this text; the last is a mistake, if there is one."""
    script, lines = folder / "my_train.py", []
    script.write_text(text)
    try:
        lines += check.stages(script, forked)
    except check.NotYet as mistake:
        lines.append(f"not yet: {mistake}")
    return lines


def changed(*pairs: str) -> str:
    """The solution with one text in place of another, which it holds once."""
    text = SOLUTION
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


RIGHT = [
    "1 rank: 20 steps, each gradient and weight as in one process",
    "2 ranks: rank 1 killed after step 15, until then as one process",
    "3 ranks: continued after epoch 1, 20 steps as in one process",
    "2 ranks: each draws dropout masks of its own, and computes in bf16",
]


@pytest.mark.slow
def test_the_solution_is_right(tmp_path):
    assert verdict(tmp_path, SOLUTION) == RIGHT


@pytest.mark.slow
def test_the_points_may_be_passed_by_name(tmp_path):
    named = changed("ddp_net(x)", "ddp_net(x=x)", "net(x).argmax", "net(x=x).argmax")
    assert verdict(tmp_path, named) == RIGHT


BATCH = "BATCH // world_size, sampler=sampler"
MISTAKES = {
    "no sampler": (
        (BATCH, "BATCH // world_size, shuffle=False"),
        "each epoch takes the points in the same order",
    ),
    "no sampler, other seeds": (
        (BATCH, "BATCH // world_size, shuffle=True"),
        "2 ranks: .* points come more than once in an epoch: the shards of the ranks overlap",
    ),
    "the shard of rank 0": (
        ("DistributedSampler(train_set)", "DistributedSampler(train_set, rank=0)"),
        "2 ranks: all ranks train on the same points",
    ),
    "whole batch": (
        ("BATCH // world_size,", "BATCH,"),
        "2 ranks: a step takes 48 points, and 24 in one process",
    ),
    "a last small batch": (
        (", drop_last=True", ""),
        "1 rank: step 11 takes 10 points, not 24: keep drop_last=True",
    ),
    "no set_epoch": (
        ("sampler.set_epoch(epoch)", "pass"),
        "1 rank: each epoch takes the points in the same order: call sampler.set_epoch",
    ),
    "set_epoch from 0": (
        ("set_epoch(epoch)", "set_epoch(epoch - first_epoch)"),
        "3 ranks that continue: epoch 2 takes the batches of epoch 1",
    ),
    "mean of means": (
        ("dist.all_reduce(labelled)", "labelled *= world_size"),
        r"2 ranks: step \d: the loss is divided by the wrong count, that of the rank alone: the "
        r"ranks have (\d+) and (\d+) points with a label, so divide the sum of all ranks by",
    ),
    "divided twice": (
        ("loss * world_size / labelled", "loss / labelled"),
        "2 ranks: step 1: the gradient is 1/2 of that of one process",
    ),
    "sum": (
        ("loss * world_size / labelled", "loss * world_size**2 / labelled"),
        "2 ranks: step 1: the gradient is the sum over the ranks, 2 times",
    ),
    "all points": (
        ("loss * world_size / labelled", "loss * world_size / BATCH"),
        r"1 rank: step 1: the gradient is 0.\d+ times that of one process: "
        "the loss is divided by the wrong count",
    ),
    "added": (
        ("optimizer.zero_grad()", "pass"),
        "1 rank: step 2: the gradient of the step before is added",
    ),
    "no DDP": (
        ("DistributedDataParallel(net)", "net"),
        "2 ranks: step 1: each rank has a gradient of its own",
    ),
    "other weights": (
        (
            "DistributedDataParallel(net)",
            "net",
            "torch.manual_seed(0)",
            "torch.manual_seed(rank)",
        ),
        "2 ranks: rank 1 begins with other weights than rank 0",
    ),
    "own mean": (
        ("Net(train_set.x,", "Net(train_set.x[rank::world_size],"),
        "2 ranks: the buffer mean on rank 0 is not that of all training points",
    ),
    "scaled rate": (
        ("lr=0.1", "lr=0.1 * world_size"),
        "2 ranks: step 1 moves the weights 2 times as far as one process",
    ),
    "one shard tested": (
        ("dist.all_reduce(correct)", "pass"),
        "2 ranks: epoch 1: .* it is that of one rank, which tests its 50 of 100 test points",
    ),
    "tested N times": (
        ("test_set[rank::world_size]", "test_set[:]"),
        "2 ranks: epoch 1: .* each rank tests all points, and the counts of all ranks are added",
    ),
    "padded": (
        (
            "test_set[rank::world_size]",
            "test_set[[i % 100 for i in range(rank, 100 + -100 % world_size, world_size)]]",
        ),
        "3 ranks that continue: epoch 2: .*: 2 test points count twice: DistributedSampler",
    ),
    "mean of accuracies": (
        (
            "dist.all_reduce(correct)",
            "correct = correct / len(y)\n        dist.all_reduce(correct)",
            "correct / len(test_set)",
            "correct / world_size",
        ),
        "3 ranks that continue: epoch 2: .* it is the mean of the ranks' accuracies",
    ),
    "all print": (
        (
            "        if rank == 0:\n            print(",
            "        print(",
            "            # Of net,",
            "        if rank == 0:\n            # Of net,",
        ),
        "2 ranks: epoch 1 is printed 2 times: let rank 0 print alone",
    ),
    "all write": (
        (
            "            # Of net,",
            "        if True:\n            # Of net,",
            'file.with_suffix(".tmp"))\n            os',
            'file.with_suffix(f".{rank}"))\n            os',
            'os.replace(file.with_suffix(".tmp")',
            'os.replace(file.with_suffix(f".{rank}")',
        ),
        "2 ranks: ranks 0 and 1 all write checkpoint.pt",
    ),
    "module.": (
        ('"net": net.state_dict()', '"net": ddp_net.state_dict()'),
        "2 ranks: the names in checkpoint.pt begin with module.",
    ),
    "no optimizer saved": (
        (', "optimizer": optimizer.state_dict()}', "}"),
        "2 ranks: checkpoint.pt lacks optimizer",
    ),
    "no epoch saved": (
        ('{**state, "epochs": epoch + 1}', "state"),
        "2 ranks: checkpoint.pt lacks epochs",
    ),
    "nothing loaded": (
        ("if file.exists()", "if False"),
        "3 ranks that continue: it begins from the start: it does not load checkpoint.pt",
    ),
    "no optimizer loaded": (
        ('optimizer.load_state_dict(state["optimizer"])', "pass"),
        "3 ranks that continue: rank 0 has lost the momentum",
    ),
    "no epoch loaded": (
        ('state["epochs"]', "0"),
        "3 ranks that continue: after epoch 1 of 3 it trains 3 epochs, not 2",
    ),
    "rank 0 loads": (
        ("if file.exists()", "if rank == 0 and file.exists()", "seconds=60", "seconds=5"),
        "3 ranks that continue: rank 1 begins with epoch 1 again: restore the epoch on all ranks",
    ),
    "same masks": (
        ("manual_seed(1 + rank)", "manual_seed(1)"),
        "2 ranks, dropout 0.2, bf16: dropout draws the same mask on all ranks",
    ),
    "no autocast": (
        ('enabled=args.precision == "bf16"', "enabled=False"),
        "2 ranks, dropout 0.2, bf16: rank 0 computes in float32",
    ),
    "no train()": (
        ("net.train()", "pass"),
        "1 rank: step 11: Net is in evaluation mode: call net.train",
    ),
    "no eval()": (
        ("net.eval()", "pass"),
        "1 rank: Net gets test points in training mode: call net.eval",
    ),
    "tested on training points": (
        ("test_set[rank::world_size]", "train_set[rank::world_size]"),
        "1 rank: Net gets training points in the test: give it those of test_set",
    ),
    "other points": (
        ("ddp_net(x)", "ddp_net(x / 2)"),
        "1 rank: Net gets points that are in neither set: leave Net's input",
    ),
    "forward()": (
        ("ddp_net(x)", "net.forward(x)"),
        "1 rank: step 1: rank 0 calls Net on no points: call net",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(tmp_path, name):
    pairs, sentence = MISTAKES[name]
    *before, line = verdict(tmp_path, changed(*pairs))
    assert before == RIGHT[: len(before)]
    assert re.match(f"not yet: .*{sentence}", line), line


def test_the_script_as_given(tmp_path):
    """It is right on one rank; all ranks of two train on the same points."""
    first, line = verdict(tmp_path, (FOLDER / "one_process.py").read_text())
    assert first == RIGHT[0]
    assert line.startswith("not yet: 2 ranks: all ranks train on the same points: give the Data")


def test_the_oracle_computes_what_autograd_does():
    net = one_process.Net(mistakes.TRAIN.x, 0).double()
    x, y = mistakes.TRAIN[:24]
    F.cross_entropy(net(x.double()), y).backward()
    weights = {name: p.detach().numpy() for name, p in net.named_parameters()}
    count = (y >= 0).sum().item()
    assert 0 < count < 24
    found = oracle.gradient(weights, mistakes.BUFFERS, x.numpy(), y.numpy(), count)
    assert not oracle.far(found, {n: p.grad.numpy() for n, p in net.named_parameters()}, 1e-6)
    right = net(mistakes.TEST.x.double()).argmax(dim=1) == mistakes.TEST.y
    x, y = mistakes.TEST.x.numpy(), mistakes.TEST.y.numpy()
    assert (oracle.correct(weights, mistakes.BUFFERS, x, y) == right.numpy()).all()


def test_one_process_reads_the_checkpoint(tmp_path):
    """The form that check.py wants is that of one_process.py."""
    net = one_process.Net(mistakes.TRAIN.x, 0)
    assert set(mistakes.SHAPES) == set(net.state_dict())
    assert mistakes.STEPS == 10
    assert [len(mistakes.TRAIN), len(mistakes.TEST)] == [250, 100]
    assert torch.equal(net.mean, mistakes.TRAIN.x.mean(dim=0))


# As a reader starts it.


def typed(*arguments, **environment) -> tuple[int, str]:
    command = [sys.executable, str(FOLDER / "check.py"), *map(str, arguments)]
    done = subprocess.run(
        command,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout


@pytest.mark.release
def test_under_torchrun():
    status, said = typed(FOLDER / "solution.py", "--timeout", 600)
    last = "correct: on 1, 2 and 3 ranks your script trains the same network"
    assert said.splitlines() == [*RIGHT, last]
    assert status == 0


@pytest.mark.slow
def test_no_file():
    assert typed("none.py") == (2, "error: there is no file none.py\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the script trains no Net: no step of an optimizer was seen"),
        ("x = 1 +", "rank 0 raises SyntaxError: "),
        ("raise ValueError('a\\nb')", "rank 0 raises ValueError: a"),
        ("import os; print('so'); os._exit(3)", "exit status "),
        ("import argparse; argparse.ArgumentParser().parse_args()", "rank 0 raises SystemExit: 2"),
    ],
)
def test_what_trains_nothing_is_one_line(tmp_path, text, line):
    (said,) = verdict(tmp_path, text)
    assert said.startswith(f"not yet: 1 rank: {line}")
    assert "\n" not in said


@pytest.mark.slow
def test_a_hang_says_where(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text("import threading\n\nthreading.Event().wait()\n")
    status, said = typed(script, "--timeout", 40)
    assert said == "not yet: 1 rank: no end in time: rank 0 is in line 3\n"
    assert status == 1
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
    assert not left


# The three logs.

JOBS = check_log.JOBS


def test_right_answers():
    for job in JOBS.values():
        (letter,) = [x for x, cause in zip("abcd", job.causes, strict=True) if not cause.mistake]
        for line in job.lines():
            assert check_log.wrong(job, job.ranks, line, letter) == ""


def test_each_tempting_answer_has_a_sentence_of_its_own():
    for job in JOBS.values():
        (right,) = [x for x, cause in zip("abcd", job.causes, strict=True) if not cause.mistake]
        line, source = job.lines()[0], [text.strip() for text in job.source()]
        assert len(job.lines()) == len(job.code)
        said = [check_log.wrong(job, {0, 1, 2} - job.ranks, line, right)]
        for text in job.wrong_lines:
            said.append(check_log.wrong(job, job.ranks, source.index(text) + 1, right))
        said.append(check_log.wrong(job, job.ranks, 1, right))
        said += [check_log.wrong(job, job.ranks, line, x) for x in "abcd" if x != right]
        assert all(said)
        assert len(set(said)) == len(said) >= 7
        assert 'line 999 is ""' in check_log.wrong(job, job.ranks, 999, right)


def log(job: int) -> str:
    return (FOLDER / f"logs/job_{job}.txt").read_text()


@pytest.mark.parametrize("job", JOBS)
def test_the_logs_are_of_these_scripts(job):
    """Each line of a traceback stands in the script, at this number."""
    source = JOBS[job].source()
    frames = re.findall(rf'File "job_{job}.py", line (\d+), in .*\n\[rank\d\]: +(.*)', log(job))
    assert (len(frames) > 0) == (job != 2)
    assert [source[int(number) - 1].strip() for number, _ in frames] == [x for _, x in frames]
    assert not re.search(r"/home/|/work/|/tmp/|pid|\d\d:\d\d:\d\d", log(job))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_the_jobs_still_do_what_the_logs_say(tmp_path, job):
    """What the ranks print, in whatever order, and how it ends."""
    output, starts = "", log(job).count("$ torchrun")
    for _ in range(starts):
        result = pool.run(FOLDER / f"logs/job_{job}.py", tmp_path, ranks=3)
        output += result.output
        assert (result.returncode == 0) == ("(exit status 0)" in log(job))
    line = re.compile(r"^rank \d, .*", re.MULTILINE)
    printed, recorded = sorted(line.findall(output)), sorted(line.findall(log(job)))
    if job == 3:  # the abort of rank 0 may come before another rank has printed
        recorded = [text for text in recorded if text in printed or text.startswith("rank 0")]
    assert printed == recorded


def test_why_the_jobs_fail():
    assert "rank 2, step 3: a wrong label" in log(1)
    assert log(1).count("Timed out waiting 30000ms") == 3
    assert "Root Cause (first observed failure):" in log(1)
    second = log(2).split("$ torchrun")[2]
    norms = dict(re.findall(r"rank (\d), step 20: \|weights\| (\S+)\n", second))
    assert f"rank 0, step 20: |weights| {norms['0']}," in log(2)
    assert norms["1"] == norms["2"] != norms["0"]
    assert re.search(r"length <= op.nbytes. \d+ vs 8", log(3))


def test_check_log_as_typed():
    def said(*arguments) -> tuple[int, str]:
        command = [sys.executable, str(FOLDER / "check_log.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + "".join(done.stderr.splitlines()[-1:])

    status, question = said(1)
    assert (status, question.count("\n")) == (0, 6)
    assert "which rank makes the mistake (--rank)" in question
    assert "which ranks hold wrong weights (--rank, such as 0 or 0,1)" in said(2)[1]
    status, answer = said(1, "--rank", "0", "--line", 28, "--cause", "a")
    assert (status, answer.count("\n"), answer[:9]) == (1, 1, "not yet: ")
    line = JOBS[2].lines()[0]
    status, answer = said(2, "--rank", "2,1", "--line", line, "--cause", "b")
    assert (status, answer[:9]) == (0, "correct: ")
    status, answer = said(2, "--rank", "x", "--line", line, "--cause", "b")
    assert status == 2
    assert answer.endswith("argument --rank: a rank such as 0, or ranks such as 0,1")
