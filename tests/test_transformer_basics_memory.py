"""transformer_basics: what a rank holds while it trains and evaluates, in bytes."""

import pool
import pytest
import torch
from helpers import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[int, dict]:
    """What the first and the last of four ranks held."""
    folder = tmp_path_factory.mktemp("bytes")
    pool.run(ROOT / "tests/workers/gpt_bytes.py", folder, ranks=4).check()
    return {rank: torch.load(folder / str(rank)) for rank in (0, 3)}


def test_evaluation_needs_no_larger_tensor_than_training(ranks):
    """64 sequences of 16 tokens in 16 micro-batches, on four ranks."""
    logits = 4 * 1024 * 16  # bytes of one sequence's
    for found in ranks.values():
        for mesh, (training, evaluating) in found["evaluation"].items():
            assert evaluating <= training, mesh
    # Else these would be of 16 sequences, or of 64.
    assert ranks[3]["evaluation"]["data parallel"][1] <= 4 * logits
    assert ranks[3]["evaluation"]["pipeline"][1] == 4 * logits


def test_accumulated_gradients_are_shards(ranks):
    """Before each micro-batch but the first: this rank's quarter, the step's loss, its tokens."""
    for found in ranks.values():
        (start, *later), all_gradients = found["sharded"]
        assert later == [start + 4 + all_gradients // 4] * 3
        # Reduced once in a step they are not: on each rank are those of the full model.
        (start, *later), _ = found["unsharded"]
        assert later == [start + 4 + all_gradients] * 3


def test_first_values_are_drawn_a_shard_at_a_time(ranks):
    """Of matrices of 1024 x 1024 numbers and more: no rank draws, or has, one of them whole."""
    for found in ranks.values():
        for mesh, (largest, drawn, held) in found["first values"].items():
            assert largest == 4 * 512 * 512, mesh  # one tile
            # Two ranks: shards end where tiles do. On 2 x 2 some tiles belong to two ranks.
            assert drawn == held or (mesh == "both" and drawn <= 2 * held), mesh
