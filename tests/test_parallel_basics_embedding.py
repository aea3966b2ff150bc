"""sharded_embedding.py: rows over the ranks train as the whole table does in one process."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from sharded_embedding import make_table, own_words

SCRIPT = ROOT / "parallel_basics/sharded_embedding.py"


# The tolerances: fp32 sums in another order give 1e-8 here. AdamW divides by the size of a
# gradient, so that one close to 0 turns the rounding into more; what moved, moved by over 1e-3.
@pytest.mark.parametrize(
    ("ranks", "optimizer", "tolerance"), [(1, "sgd", 1e-6), (2, "adamw", 1e-5), (3, "sgd", 1e-6)]
)
def test_equals_one_process(ranks, optimizer, tolerance):
    """1,088 rows do not divide by three."""
    args = ("--device", "cpu", "--optimizer", optimizer)
    output = pool.run(SCRIPT, *args, ranks=ranks, timeout=60).check().output
    losses = [float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    moved = re.search(r"moved by up to:((?: [\d.e+-]+)+)", output)[1].split()
    assert len(moved) == 5
    assert all(float(number) > 1e-3 for number in moved), output  # all of them have learned
    found = re.search(r"one process: gradient ([\d.e+-]+), parameter ([\d.e+-]+)", output)
    assert float(found[1]) < 1e-6, output
    assert float(found[2]) < tolerance, output
    assert f"rank 0 holds {1088 // ranks:,} of 1,088 rows" in output


def test_the_sums_of_parts_are_those_of_the_table():
    words = torch.tensor([[0, 400, 1087], [1, 2, 3], [399, 399, 400]])
    parts = [make_table(*cut)(*own_words(words, *cut)) for cut in ((0, 400), (400, 1088))]
    assert torch.equal(parts[0][1], make_table(0, 1088)(words)[1])  # all its words are in one part
    assert not parts[1][1].any()
    torch.testing.assert_close(sum(parts), make_table(0, 1088)(words))


def test_ranks_that_do_not_divide_the_batch():
    result = pool.run(SCRIPT, "--device", "cpu", ranks=7, timeout=60)
    assert result.returncode == 2
    assert result.output.count("120 images do not divide among 7 ranks") == 1
    assert "Traceback" not in result.output
