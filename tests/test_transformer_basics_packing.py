"""transformer_basics: windows with several documents, their masks, and the mean of all tokens.

The matrix of test_transformer_basics.py compares the gradients of every kind of mesh with those of
each document alone ("documents"). Here are borders, counts and losses by hand.
"""

import json
import random

import evaluation
import numpy as np
import pool
import pytest
import torch
import torch.distributed as dist
from config import AXES, Settings
from data import Windows
from helpers import ROOT, read_metrics
from model import GPT, GPTConfig, cross_entropy
from packing import document_starts, tokens_per_rank
from shards import Shard
from torch.distributed.device_mesh import init_device_mesh

MASKS = Settings(document_masks=True)
NONE = -100
LLAMA = {"architecture": "llama", "kv_heads": 1, "window": 3}


def test_targets_do_not_cross_borders():
    """Documents of 4, 1, 5 and 3 tokens in windows of 4: 0 1 2 3 | 4 | 5 6 7 8 9 | 10 11 12."""
    shard = Shard(np.arange(13, dtype=np.uint16), np.array([0, 4, 5, 10]))
    x, y = Windows([shard], 4, document_masks=True).read(np.arange(3))
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert y.tolist() == [[1, 2, 3, NONE], [NONE, 6, 7, 8], [9, NONE, 11, 12]]
    _, y = Windows([shard], 4).read(np.arange(3))
    assert y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def test_starts_by_hand():
    y = torch.tensor([[5, NONE, NONE, 5, 5], [5, 5, 5, 5, NONE], [NONE, 5, NONE, 5, 5]])
    expected = [[0, 0, 2, 3, 3], [0, 0, 0, 0, 0], [0, 1, 1, 3, 3]]
    assert document_starts(y, MASKS).tolist() == expected
    assert document_starts(y, Settings()) is None


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_documents_alone_have_the_losses_of_the_packed_window(shape):
    torch.manual_seed(0)
    model = GPT(GPTConfig(20, 16, 2, 4, 16, **shape))
    documents = [torch.randint(20, (length,)) for length in (5, 1, 7, 3)]
    tokens = torch.cat(documents)
    y = tokens.roll(-1)[None]
    ends = torch.tensor([len(document) for document in documents]).cumsum(0) - 1
    y[0, ends] = NONE
    logits = model(tokens[None], starts_BT=document_starts(y, MASKS))
    alone = torch.cat([model(document[None]) for document in documents], dim=1)
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
    assert (logits - model(tokens[None])).abs().max() > 1e-2
    by_hand = [-alone[0, i].log_softmax(-1)[y[0, i]].item() for i in range(16) if y[0, i] != NONE]
    assert len(by_hand) == 12
    assert cross_entropy(logits, y, "sum").item() == pytest.approx(sum(by_hand), abs=1e-4)


def test_unequal_counts_of_ranks(monkeypatch):
    """Ranks with 3, 1, 8 and 4 tokens that count: 4 on average."""
    counts = [3.0, 1.0, 8.0, 4.0]
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.fill_(sum(counts)))
    assert tokens_per_rank(torch.tensor([[5, 5, 5, NONE, NONE]]), MASKS) == 4
    assert tokens_per_rank(torch.tensor([[5, 5, 5, NONE, NONE]]), Settings()) == 5


def test_held_out_loss_with_masks(group):
    """In micro-batches of 2 with 9 and 1 tokens that count."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(20, 5, 2, 4, 16))
    x, y = torch.randint(20, (2, 4, 5))
    y[0, 2] = NONE
    y[2:] = NONE
    y[2, 0] = 7
    settings = Settings(batch_size=4, accumulate=2, dp_replicate=1, document_masks=True)
    mesh = init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES)
    found = evaluation.evaluate(model, None, (x, y), mesh, settings)
    losses = []
    for row, targets in zip(x, y.tolist(), strict=True):
        begin = 0
        for i, target in enumerate(targets):
            if target == NONE:
                begin = i + 1
            else:
                logits = model(row[None, begin : i + 1])[0, -1]
                losses.append(-logits.log_softmax(-1)[target].item())
    assert len(losses) == 10
    assert found == pytest.approx(sum(losses) / 10, abs=1e-5)


# ---- the whole script on prepared shards

TINY = (
    *("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8),
    *("--steps", 8, "--log-every", 1, "--eval-every", 4, "--eval-batches", 2),
    *("--checkpoint-every", 4, "--sample", 4, "--document-masks"),
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    draw = random.Random(0)
    lines = [json.dumps({"text": "word " * draw.choice([1, 1, 2, 30])}) for _ in range(300)]
    lines = [line.replace("word", f"w{i}") for i, line in enumerate(lines)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    script = ROOT / "transformer_basics/prepare.py"
    flags = ("--held-out-every", 4, "--shard-mb", 0.005, "--processes", 1)
    pool.run(script, folder / "out", folder / "a.jsonl", *flags).check()
    return folder / "out"


def logged(folder, tokens, *meshes) -> list[float]:
    """Losses of a run that is stopped once for each further mesh, and continued on it."""
    script = ROOT / "tests/workers/gpt_resume.py"
    for i, (ranks, flags) in enumerate(meshes):
        stop = 3 if i < len(meshes) - 1 else 0
        args = (*TINY, "--output-dir", folder, "--data", tokens, *flags.split())
        said = pool.run(script, stop, *args, ranks=ranks).check().output
    assert i == 0 or "continuing from" in said
    lines = read_metrics(folder)
    return [value for line in lines for key, value in line.items() if key.endswith("loss")]


@pytest.mark.slow
def test_a_run_on_shards_goes_on_with_other_ranks(tokens, tmp_path):
    """Loss and validation loss are those of one process; ranks have unequal counts of tokens."""
    expected = logged(tmp_path / "one", tokens, (1, ""))
    assert len(expected) == 10
    meshes = (2, "--accumulate 2"), (4, "--dp-shard 2 --dp-replicate 2"), (1, "--accumulate 4")
    assert logged(tmp_path / "moved", tokens, *meshes) == pytest.approx(expected, abs=2e-5)
