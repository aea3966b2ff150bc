"""docs/your_model.md: the lines of train.py that it names exist, and its change of them works."""

import re

import pytest
from helpers import ROOT, read_metrics
from rows import Copy

PAGE = (ROOT / "docs/your_model.md").read_text()
SMALL = ("--batch-size", 240, "--log-every", 1, "--depth", 1, "--dim", 32, "--clip", 0)


def changes(section: str) -> list[tuple[str, str]]:
    """(a line, the lines in its place), of the diff in a section of the page."""
    found, section = [], PAGE.partition(f"## {section}")[2]
    for line in re.search(r"```diff\n(.*?)```", section, re.S)[1].splitlines(keepends=True):
        if line.startswith("-"):
            found.append((line[1:], ""))
        elif line.startswith(" "):  # it stays
            found.append((line[1:], line[1:]))
        else:
            old, new = found[-1]
            found[-1] = (old, new + line[1:])
    return found


def test_the_table_names_what_the_template_uses_of_task_py():
    table = PAGE.partition("| name | what it is |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row.partition(", of")[0])}
    used = set()
    for file in (ROOT / "fsdp_basics").glob("*.py"):
        for names in re.findall(r"^from task import (.*)", file.read_text(), re.M):
            used |= set(names.split(", "))
    assert named == used


@pytest.mark.slow
def test_a_run_with_two_optimizers_continues_with_the_same_bits(tmp_path):
    copy = Copy("fsdp_basics", tmp_path)
    for old, new in changes("Two optimizers"):
        copy.edit("train.py", old, new)
    copy.edit(
        "optimizer.py",
        "    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)",
        "    sgd = torch.optim.SGD(groups[1:], lr=settings.lr, momentum=0.9)\n"
        "    return [torch.optim.AdamW(groups[:1], lr=settings.lr, fused=True), sgd]",
    )

    def steps(folder) -> list[dict]:
        names = ("step", "loss", "grad_norm", "test_loss")
        return [{n: line[n] for n in names if n in line} for line in read_metrics(folder)]

    whole, halves = copy.path / "runs/whole", copy.path / "runs/halves"
    copy.run("train.py", *SMALL, "--epochs", 2, "--output-dir", whole).check()
    stops = "stopped_by = 15 * (step in (3, 5))"  # in an epoch, and at its end
    copy.edit("train.py", "stopped_by = stop.agreed(step)", stops)
    outputs = [copy.run("train.py", *SMALL, "--epochs", 2, "--output-dir", halves)]
    outputs += [copy.run("train.py", *SMALL, "--epochs", 2, "--output-dir", halves)]
    outputs += [copy.run("train.py", *SMALL, "--epochs", 2, "--output-dir", halves).check()]
    for step, after in zip((3, 5), outputs[1:], strict=True):
        assert f"after step {step}" in after.output
    assert steps(halves) == steps(whole)
    assert len(steps(whole)) > 10


STUDENT_AND_TEACHER = """

class Pair(nn.Module):
    def __init__(self, student: nn.Module):
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False)

    def forward(self, images):
        return self.student(images) + self.teacher(images)
"""


def with_a_teacher(directory: str, folder, moves: bool = True) -> Copy:
    """A directory whose model is the sum of a student and of a teacher that follows it."""
    copy = Copy(directory, folder)
    task = copy.path / "task.py"
    text = task.read_text().replace("def build_model(", "def build_student(", 1)
    task.write_text(
        f"import copy\n{text}{STUDENT_AND_TEACHER}\n\ndef build_model(settings):\n"
        "    return Pair(build_student(settings))\n"
    )
    if directory == "fsdp_basics":  # the teacher's layers are units, or the root's
        copy.edit("task.py", "[model.patches, *model.blocks, [model.norm, model.head]]", "UNITS")
        copy.edit("task.py", "return UNITS", "return [*model.student.blocks]")
    for old, new in changes("A teacher that follows the model"):
        new = new.replace("0.004", "0.5")
        new = new if directory == "fsdp_basics" else new.replace("model.", "ddp_model.module.")
        copy.edit("train.py", old, new if moves else old)
    return copy


@pytest.mark.slow
def test_a_teacher_moves_as_in_one_process(tmp_path):
    """Also after an evaluation, which leaves parameters gathered, and with micro-batches."""
    steps = ("--batch-size", 240, "--log-every", 1, "--epochs", 2)
    losses = {}
    for directory, ranks, moves in (
        ("ddp_basics", 1, True),
        ("ddp_basics", 2, True),
        ("ddp_basics", 1, False),
        ("fsdp_basics", 1, True),
        ("fsdp_basics", 2, True),
        ("fsdp_basics", 1, False),
    ):
        folder = tmp_path / f"{directory}{ranks}{moves}"
        copy = with_a_teacher(directory, folder, moves)
        flags = (*steps, "--accumulate", 2, "--output-dir", folder / "run")
        copy.run("train.py", *flags, ranks=ranks).check()
        lines = read_metrics(folder / "run")
        losses[directory, ranks, moves] = [line["loss"] for line in lines if "loss" in line]
    for directory in ("ddp_basics", "fsdp_basics"):
        expected = losses[directory, 1, True]
        assert len(expected) == 10
        assert losses[directory, 2, True] == pytest.approx(expected, rel=1e-4)
        assert losses[directory, 1, False][1:] != pytest.approx(expected[1:], rel=1e-2)


@pytest.mark.parametrize("directory", ["ddp_basics", "fsdp_basics"])
def test_the_lines_that_change_for_a_stream_exist(directory):
    code = (ROOT / directory / "train.py").read_text()
    rows = re.findall(r"^\| `(.*?)` \|", PAGE.partition("## A stream")[2], re.M)
    assert len(rows) == 6
    assert [row for row in rows if row not in code] == []
