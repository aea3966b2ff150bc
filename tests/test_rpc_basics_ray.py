"""Actors: Ray's parameter server equals one process; the Monarch example prints what is shown."""

import re
import sys
import tempfile

import psutil
import pytest
from helpers import QUICK_RAY, ROOT, Job, before_others, installed, python

SCRIPT = ROOT / "rpc_basics/ray_parameter_server.py"
needs_ray = pytest.mark.skipif(
    not installed("ray"),
    reason="needs Ray: pip install -r requirements-clusters.txt",
)


@needs_ray
@pytest.mark.slow  # Ray starts half a dozen processes
def test_actors_train_as_one_process_does():
    """Tolerance: fp32 means of two gradients, after 20 steps; parameters change by over 0.1."""
    with tempfile.TemporaryDirectory() as folder:  # short: the names of sockets have a limit
        # Ray writes a token to HOME, and sockets and logs to RAY_TMPDIR.
        told = {"HOME": folder, "RAY_TMPDIR": folder} | QUICK_RAY
        with Job(before_others(sys.executable, SCRIPT, "--timeout", 300), **told) as job:
            output = job.wait(800).check().output
            # Its last processes end a moment after the driver.
            left = psutil.wait_procs(job.processes(), timeout=120)[1]
        assert not left, f"{left}\n{output}"
    moved = re.search(r"2,410 parameters, largest change ([\d.e+-]+)", output)[1]
    difference = re.search(r"largest difference from one process: ([\d.e+-]+)", output)[1]
    assert float(moved) > 0.1
    assert float(difference) < 1e-6


@pytest.mark.slow
@needs_ray
def test_ray_is_imported_without_what_it_does_not_need(tmp_path):
    """QUICK_RAY, without which it did not come up on a busy machine."""
    script = tmp_path / "imports.py"
    script.write_text("import sys, ray\nprint(*sys.modules)\n")
    loaded = python(script, timeout=100, cold=True, **QUICK_RAY).check().output.split()
    assert "ray" in loaded
    assert "rfc3987_syntax.syntax_helpers" not in loaded


@needs_ray
def test_trainers_that_do_not_divide_the_batch():
    result = python(SCRIPT, "--trainers", 7, timeout=60)
    assert result.returncode == 2
    assert result.output.endswith("error: 120 images do not divide among 7 trainers\n")


@pytest.mark.slow
def test_without_ray_one_sentence_says_how_to_get_it(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    result = python(SCRIPT, timeout=60, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    says = "error: Ray is not installed: pip install -r requirements-clusters.txt\n"
    assert result.output.endswith(says)
    assert "Traceback" not in result.output


@pytest.mark.skipif(not installed("monarch"), reason="needs Monarch: what_to_use_today.md says how")
@pytest.mark.slow
def test_the_example_of_monarch_counts_as_printed(tmp_path):
    page = (ROOT / "rpc_basics/what_to_use_today.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```.*?(controller: .*?)\n```", page, re.S).groups()
    script = tmp_path / "counter.py"
    script.write_text(code)
    output = python(script, timeout=300, cold=True).check().output
    numbers = re.findall(r"process (\d+)", output)
    assert len(set(numbers)) == 3  # two actors, and the controller
    for line in re.sub(r"process \d+", "", printed).splitlines():
        assert line.strip() in re.sub(r"process \d+", "", output)
