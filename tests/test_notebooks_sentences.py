"""Sentences of the chapters that rest on a number or on torch: they agree with what is printed."""

import json
import re

import pytest
from helpers import ROOT

# chapter, what its text says, what its cells print
SAYS = [
    ("08", "the last column has not grown", "     564,784   2,823,824       1,694,280"),
    ("08", "Stages 1 and 2 send what DDP sends", "stage 1            2,823,824"),
    ("04", "`recursive_halving_doubling` for 1 GB", "6.726   211.513"),
    ("06", "The 1.828 is the norm of rank 0's own gradient", "1.828             0.20"),
    ("09", "plan for **four units**", "forward and backward 4.0"),
    ("09", "Prefetching adds the next flat buffer", "prefetching  forward 3.0 units"),
    ("10", "228 + 456 = 684 bytes", "{'parameters': 228, 'averages of AdamW': 456}"),
    ("12", "(49 KB instead of 12)", "cut the wrong way  all_reduce 49 KB"),
    ("12", "(49 KB instead of 12)", "tensor parallel    all_reduce 12 KB"),
    (
        "13",
        "So each rank contributes two numbers per token",
        "loss      1 collectives of 1,024 bytes",
    ),
    ("13", "makes 30 `all_reduce`", "AdamW's step: 30 all_reduces"),
    ("13", "the gradients of the norms are `Partial`", "are Partial: 10, all of norms: True"),
    ("13", "about half of the true gradient", "norm 0.0647 here, 0.1183 summed"),
    ("13", "Only the last cut matrix has the right gradient", f"{'head.weight':32} 0.00"),
    ("13", "All other gradients are wrong from the first step", "more than a tenth off: 34 of 35"),
    ("15", "the step by 42 % (81 instead of 57)", "step  81.0"),
    ("15", "the step by 42 % (81 instead of 57)", "step  57.0"),
    ("22", 'the number of "flag first" changes', "torn reads in 200 rounds: {'flag first'"),
    (
        "22",
        "of this model, whose loads never overtake each other",
        "the third, with the reader's two loads exchanged: torn",
    ),
]


@pytest.mark.parametrize(("chapter", "sentence", "printed"), SAYS)
def test_a_sentence_and_its_number(chapter, sentence, printed):
    (file,) = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    assert sentence in "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert printed in "".join("".join(out.get("text", "")) for out in outputs)


def minutes_to_read(cells: list[dict]) -> float:
    """200 words of prose a minute, 30 lines of code, 60 lines of output; without exercises."""
    minutes = 0.0
    for cell in cells:
        source = "".join(cell["source"])
        if source.startswith("## Exercises") or "exercise" in cell["metadata"].get("tags", []):
            break
        if cell["cell_type"] == "markdown":
            minutes += len(re.sub(r"```.*?```", "", source, flags=re.DOTALL).split()) / 200
        else:
            minutes += sum(map(bool, source.split("\n"))) / 30
            outputs = "".join("".join(out.get("text", "")) for out in cell["outputs"])
            minutes += len(outputs.splitlines()) / 60
    return minutes


CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", CHAPTERS, ids=lambda file: file.stem)
def test_a_chapter_is_read_in_45_minutes(file):
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert minutes_to_read(cells) < 45
    says = re.search(
        r"([Aa]bout an hour|\d+ minutes)[^.;,]* read|Reading: (\d+ minutes)",
        "".join(cells[0]["source"]),
    )
    promised = re.search(r"\d+", says[0])
    assert promised, "an hour is more than 45 minutes"
    assert minutes_to_read(cells) - 5 < int(promised[0]) <= 45


def test_context_parallel_of_torch_gathers_by_default():
    """Chapter 16: "By default it is *not* a ring"."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    assert _attention._cp_options.rotate_method is _attention._RotateMethod.ALL_GATHER
