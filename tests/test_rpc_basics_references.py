"""What keeps an object of another worker, counted; and a pipeline by references to results."""

import re

import pool
import pytest
from helpers import ROOT

SCRIPTS = ROOT / "rpc_basics"


# ---- rref_lifetime.py

LINE = r"^ *\d+ +[\d.]+  (.{42}) *(\d+) +(\d+)$"


@pytest.mark.slow
def test_an_object_lives_as_long_as_the_references_to_it(tmp_path):
    """The script itself waits for the counts that it prints, and fails where they never come."""
    picture = tmp_path / "lifetime.png"
    command = (SCRIPTS / "rref_lifetime.py", "--rounds", 5, "--plot", picture)
    output = pool.run(*command, ranks=3).check().output
    found = re.findall(LINE, output, re.MULTILINE)
    told = [(what.strip(), int(references), int(objects)) for what, references, objects in found]
    assert told == [
        ("remote(): made one", 1, 1),
        ("to_here(): fetched a copy, dropped it", 1, 1),
        ("gave worker2 a reference, which it keeps", 2, 1),
        ("dropped its own", 1, 1),
        ("had worker2 drop the other", 0, 0),
        ("5 rounds, each kept a reference", 5, 5),
        ("took the sums instead", 0, 0),
        ("5 rounds, each kept a sum", 1, 1),
        ("dropped the loop's variable", 0, 0),
        ("keeps one until its end", 1, 1),
    ], output
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Shutdown deletes references first; then it waits for the call, so that this sees none.
    assert "waited for the call: yes; objects when the call ended: [0], now: 0" in output


def test_lifetime_needs_three_workers():
    result = pool.run(SCRIPTS / "rref_lifetime.py", ranks=2, timeout=60)
    assert result.returncode == 2
    assert result.output.count("needs 3 workers or more, not 2: --nproc_per_node=3") == 1


# ---- pipeline_with_rpc.py


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.slow
def test_both_pipelines_have_the_gradients_of_one_process(microbatches):
    """The tolerance: fp32 sums over micro-batches; the largest gradient is some 1e-1."""
    command = (SCRIPTS / "pipeline_with_rpc.py", "--microbatches", microbatches, "--repeats", 2)
    output = pool.run(*command, ranks=2, timeout=60).check().output
    assert float(re.search(r"largest gradient ([\d.e+-]+)", output)[1]) > 1e-2
    found = dict(re.findall(r"^(\w+) .*to one process ([\d.e+-]+)$", output, re.MULTILINE))
    assert found.keys() == {"calls", "pipelining"}
    assert all(float(number) < 1e-6 for number in found.values()), output


@pytest.mark.parametrize(
    ("ranks", "microbatches", "says"),
    [
        (1, 4, "needs 2 workers or more, not 1"),
        (3, 4, "two workers, and micro-batches that divide 64 images"),
        (2, 7, "two workers, and micro-batches that divide 64 images"),
    ],
)
def test_pipeline_says_what_does_not_work(ranks, microbatches, says):
    command = (SCRIPTS / "pipeline_with_rpc.py", "--microbatches", microbatches)
    result = pool.run(*command, ranks=ranks, timeout=60)
    assert result.returncode == 2, result.output
    assert result.output.count(says) == 1
