"""transformer_basics/generate.py: any mesh writes the token ids that one process writes."""

from pathlib import Path

import pool
import pytest
import torch
from helpers import ROOT, learned
from on_demand import OnDemand
from workers.gpt_generate import HOW

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests/workers/gpt_generate.py"
TRAIN, GENERATE = (ROOT / "transformer_basics" / name for name in ("train.py", "generate.py"))
SIZES = ("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8)
STEPS = ("--steps", 120, "--lr", 0.02, "--eval-batches", 1, "--sample", 0)
TEXT = "to be or not to be, that is the question: "  # what follows "t" depends on what was before


def written(run: Path, mesh: str, ranks: int) -> list[dict[str, list[int]]]:
    """The token ids of each rank. 30 tokens: the window of 16 moves over them."""
    args = (run, "--prompt", "to be ", "--tokens", 30, *mesh.split())
    file = run / f"tokens {mesh}"
    pool.run(WORKER, file, *args, ranks=ranks).check()
    return [torch.load(f"{file}.{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def run(request, tmp_path_factory):
    """Trained with context parallelism; what a mesh of these flags then writes."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text(TEXT * 300)
    args = (*SIZES, *STEPS, "--architecture", request.param, "--cp", 2, "--data", text)
    pool.run(TRAIN, *args, "--output-dir", folder, ranks=2).check()
    return OnDemand(lambda mesh: written(folder, mesh, 2 if mesh else 1))


def test_the_seed_decides_what_is_drawn(run):
    (texts,) = run[""]
    assert len({tuple(tokens) for tokens in texts.values()}) == len(HOW)
    assert all(tokens[:6] == list(b"to be ") and len(tokens) == 36 for tokens in texts.values())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mesh", ["--tp 2", "--pp 2", "--dp-shard 2", "--cp 2"])
def test_two_ranks_write_what_one_process_writes(run, mesh, how):
    (expected,) = run[""]
    assert [texts[how] for texts in run[mesh]] == [expected[how]] * 2


def test_a_window_that_hides_nothing_works_with_context_parallelism(tmp_path):
    """As a Mistral has one, of 4,096 tokens."""
    for name, flags in (("with", ("--window", 16)), ("without", ())):
        args = (*SIZES, *STEPS, "--steps", 1, "--cp", 2, *flags, "--output-dir", tmp_path / name)
        pool.run(TRAIN, *args, ranks=2).check()
    assert learned(tmp_path / "with") == learned(tmp_path / "without")


def test_a_window_is_refused_with_context_parallelism(tmp_path):
    args = (*SIZES, *STEPS, "--steps", 1, "--window", 5, "--output-dir", tmp_path)
    pool.run(TRAIN, *args).check()
    result = pool.run(GENERATE, tmp_path, "--cp", 2, ranks=2)
    assert result.returncode == 2
    assert result.output.count("error: --cp does not work with --window: the ring has only") == 1
