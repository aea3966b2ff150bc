"""transformer_basics: what a rank holds while it trains and evaluates, in bytes."""

import re

import pool
import pytest
import torch
from helpers import ROOT, python

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


def test_logits_never_exist_whole(ranks):
    """Peaks in training and in evaluation. A rank computes 16 x 16 tokens, or 64 x 16 with tp 4.

    float32 numbers per logit: backward holds log-probabilities and two gradients; evaluation holds
    logits and log-probabilities. --loss-parallel has one tensor more.
    """
    all_logits = 4 * 16 * 16 * 1024  # bytes, one number each
    assert ranks[3]["logits"] == {
        "in one chunk": (3 * all_logits, 2 * all_logits),
        "in chunks": (3 * all_logits / 8, 2 * all_logits / 8),
        "sharded, in chunks": (3 * all_logits / 8, 2 * all_logits / 8),
        "tensor parallel, in chunks": (4 * all_logits / 8, 3 * all_logits / 8),
        "pipeline, in chunks": (3 * all_logits / 8, 2 * all_logits / 8),
        "bf16, in chunks": (3 * all_logits / 8, 2.5 * all_logits / 8),
    }
    nothing = ranks[0]["logits"]["pipeline, in chunks"]  # on the first stage
    assert nothing == (0, 0)


# Numbers per token that one block of GPT-2 keeps, of width 64 with 4 heads: one for each head is
# attention's sum of exponentials, two belong to each norm.
INPUT, HEADS, NORMS = 64, 4, 2 * 2
KEPT = {
    # input, its norm, query, key, value, attention, sum, its norm; expand and GELU are 4 x as wide
    None: 16 * INPUT + HEADS + NORMS,
    "full": INPUT,
    # input, query, key, value, attention, out, contract; expand
    "selective": 11 * INPUT + HEADS,
}
KEPT[2] = (KEPT[None] + KEPT["full"]) / 2


@pytest.mark.parametrize("mode", KEPT)
def test_activation_checkpointing_keeps_what_the_formula_says(ranks, mode):
    """16 sequences of 16 tokens; two blocks more."""
    for found in ranks.values():
        kept = found["activations"]
        assert kept[4, mode] - kept[2, mode] == 2 * 4 * 16 * 16 * KEPT[mode]


def test_first_values_are_drawn_a_shard_at_a_time(ranks):
    """Of matrices of 1024 x 1024 numbers and more: no rank draws, or has, one of them whole."""
    for found in ranks.values():
        for mesh, (largest, drawn, held) in found["first values"].items():
            assert largest == 4 * 512 * 512, mesh  # one tile
            # Two ranks: shards end where tiles do. On 2 x 2 some tiles belong to two ranks.
            assert drawn == held or (mesh == "both" and drawn <= 2 * held), mesh


# ---- memory_at_scale.py: the bytes of one of 1,024 ranks

SMALL = "--layers 8 --heads 8 --dim 64 --block-size 64 --vocab-size 320"
BLOCK = (12 * 64 * 64 + 6 * 64, 6 * 64)  # numbers that tp shards, and those it does not
# Of 8 x 2 x 8 x 8 ranks each stage has one layer. 15 tensors are in a block, 2 before all blocks,
# 3 behind them. (flags, numbers on the rank, tensors of the rank)
SCALE = {
    "first": ("--rank 0", (BLOCK[0] + (320 + 64) * 64) // 64 + BLOCK[1] // 8, 17),
    "middle": ("--rank 600", BLOCK[0] // 64 + BLOCK[1] // 8, 15),
    "last": ("--rank 1023", (BLOCK[0] + 320 * 64) // 64 + (BLOCK[1] + 2 * 64) // 8, 18),
    "tied, last": (
        "--tied --rank 1023",
        (BLOCK[0] + 320 * 64) // 64 + (BLOCK[1] + 2 * 64) // 8,
        18,
    ),
    "context": ("--rank 600 --dp-shard 4 --cp 2", BLOCK[0] // 64 + BLOCK[1] // 8, 15),
    "replicas": ("--rank 0 --pp 1 --dp-shard 1 --tp 1", 8 * sum(BLOCK) + 704 * 64 + 128, 125),
    # Of 12 rows over 8 shards the first six ranks have two, of 20 the first six three and the next
    # one two, of 48 each has six: a weight of 12 columns and a bias.
    "uneven": ("--rank 6", 2 * 2 * 12 + 6 * 13, 20),
    "uneven, last": ("--rank 7", 6 * 13, 20),
    "uneven, context": ("--rank 6 --dp-shard 4 --cp 2", 2 * 2 * 12 + 6 * 13, 20),
    # Heads of 128: queries and out have 2048 of them, keys and values 1024 each.
    "preset qwen3-0.6b": (
        "--no-tied --layers 8 --block-size 64 --vocab-size 320",
        (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 320 * 1024) // 64
        + (2 * 1024 + 2 * 128) // 8,
        12,
    ),
    # Biases of query, key and value: 28 heads and 4, of 128. 15 tensors: 12 and three biases.
    "preset qwen2.5-7b": (
        "--ranks 32 --pp 1 --tp 4 --dp-shard 8 --layers 1 --block-size 64 --vocab-size 320",
        (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944 + 2 * 320 * 3584) // 32
        + (3584 + 2 * 512) // 32
        + 3 * 3584 // 8,
        15,
    ),
    # Tied. 3 heads of keys and values on 6 ranks: each has all of them.
    "preset smollm2-135m": (
        "--ranks 6 --tp 6 --pp 1 --dp-shard 1 --layers 1 --heads 12 --vocab-size 48"
        " --block-size 48",
        (2 * 12 * 64 * 576 + 3 * 1536 * 576 + 48 * 576) // 6 + 2 * 3 * 64 * 576 + 3 * 576,
        11,
    ),
}
UNEVEN = "--ranks 8 --pp 1 --tp 1 --layers 1 --heads 2 --dim 12 --block-size 12 --vocab-size 20"


@pytest.mark.parametrize("name", SCALE)
def test_bytes_at_scale_are_what_arithmetic_says(name):
    flags, numbers, tensors = SCALE[name]
    sizes = UNEVEN if "uneven" in name else SMALL
    flags = f"{flags} {'--' + name if 'preset' in name else sizes}"
    said = python(ROOT / "transformer_basics/memory_at_scale.py", *flags.split()).check().output
    table = re.findall(r"^([a-z ]+?) +([\d,]+) +([\d,]+) +[\d.]+$", said, re.M)
    found = {name: tuple(int(n.replace(",", "")) for n in rest) for name, *rest in table}
    adam = 8 * numbers + 4 * tensors
    assert found == {
        "parameters": (4 * numbers,) * 2,
        "gradients": (4 * numbers,) * 2,
        "optimizer state": (adam,) * 2,
        "sum": (8 * numbers + adam,) * 2,
    }


def test_readme_has_the_bytes_of_gpt_3():
    block, rest = 12 * 12288**2 + 6 * 12288, 6 * 12288  # as BLOCK
    numbers = 12 * (block // 64 + rest // 8) + 50304 * 12288 // 64 + 2 * 12288 // 8
    adam = 8 * numbers + 4 * (12 * 15 + 3)
    readme = (ROOT / "transformer_basics/README.md").read_text()
    for name, value in (("parameters", 4 * numbers), ("optimizer state", adam)):
        assert re.search(rf"^    {name} +{value:,} +{value:,} ", readme, re.M), name


def test_dry_run_says_which_rank_it_is():
    flags = ("--rank", 600, *SMALL.split())
    said = python(ROOT / "transformer_basics/memory_at_scale.py", *flags).check().output
    # 600 = 4 x 128 + 1 x 64 + 3 x 8 + 0
    assert "rank 600 of 1024: pp 4, dp_replicate 1, dp_shard 3, cp 0, tp 0; layers 4 to 4\n" in said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--rank 1024", "--rank 1024: the ranks are 0 to 1023"),
        ("--vocab-size 50257", "--vocab-size 50257 does not divide by --tp 8"),
        ("--ranks 1000", "do not multiply to the 1000 rank(s) of this job"),
    ],
)
def test_dry_run_refuses_what_does_not_fit(flags, sentence):
    result = python(ROOT / "transformer_basics/memory_at_scale.py", *flags.split())
    assert result.returncode == 2
    assert sentence in result.output
