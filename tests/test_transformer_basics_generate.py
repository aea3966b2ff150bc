"""transformer_basics/generate.py: any mesh writes the token ids that one process writes."""

from pathlib import Path

import pool
import pytest
import torch
from helpers import ROOT

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests/workers/gpt_generate.py"
SIZES = ("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8)
STEPS = ("--steps", 120, "--lr", 0.02, "--eval-batches", 1, "--sample", 0)
TEXT = "to be or not to be, that is the question: "  # what follows "t" depends on what was before
HOW = {
    "greedy": ("--temperature", 0),
    "drawn": ("--temperature", 3, "--top-k", 0),
    "seed": ("--temperature", 3, "--top-k", 0, "--seed", 1),
}


def written(run: Path, out: Path, how: str, mesh: str, ranks: int) -> list[list[int]]:
    """The token ids of each rank. 30 tokens: the window of 16 moves over them."""
    args = (run, "--prompt", "to be ", "--tokens", 30, *HOW[how], *mesh.split())
    pool.run(WORKER, out / "tokens", *args, ranks=ranks).check()
    return [torch.load(out / f"tokens.{rank}")[0].tolist() for rank in range(ranks)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def run(request, tmp_path_factory):
    """Trained with context parallelism; what one process then writes."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text(TEXT * 300)
    args = (*SIZES, *STEPS, "--architecture", request.param, "--cp", 2, "--data", text)
    train = ROOT / "transformer_basics/train.py"
    pool.run(train, *args, "--output-dir", folder / "run", ranks=2).check()
    return folder / "run", {how: written(folder / "run", folder, how, "", 1)[0] for how in HOW}


def test_the_seed_decides_what_is_drawn(run):
    texts = run[1].values()
    assert len({tuple(tokens) for tokens in texts}) == len(HOW)
    assert all(tokens[:6] == list(b"to be ") and len(tokens) == 36 for tokens in texts)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mesh", ["--tp 2", "--pp 2", "--dp-shard 2", "--cp 2"])
def test_two_ranks_write_what_one_process_writes(run, tmp_path, mesh, how):
    folder, expected = run
    assert written(folder, tmp_path, how, mesh, 2) == [expected[how]] * 2
