"""parallel_basics/grouped_query_attention.py: sharded by heads, compared with one process."""

import re

import grouped_query_attention
import pool
import pytest
import torch
from arguments import UserError
from helpers import ROOT
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

SCRIPT = ROOT / "parallel_basics/grouped_query_attention.py"
HEADS, WIDTH = 4, 16
SIZE = WIDTH // HEADS


@pytest.fixture(scope="module", params=[1, 2, 4])
def seen(request, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("grouped") / "seen.pt"
    worker = ROOT / "tests/workers/parallel_grouped.py"
    pool.run(worker, path, ranks=request.param, timeout=400).check()
    return torch.load(path, map_location="cpu", weights_only=False)


def logits(w: dict, tokens: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """One head after another, in float64."""
    x = w["embedding.weight"][tokens]
    epsilon = torch.finfo(torch.float32).eps
    normal = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * w["norm.weight"]
    q, k, v = (normal @ w[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
    future = torch.ones(2 * tokens.shape[1:], dtype=torch.bool).triu(1)
    mixed = []
    for head in range(HEADS):
        mine, shared = slots(head), slots(head * kv_heads // HEADS)
        scores = q[..., mine] @ k[..., shared].mT / SIZE**0.5
        mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[..., shared])
    y = x + torch.cat(mixed, -1) @ w["attention.out.weight"].T
    return y @ w["head.weight"].T


def slots(head: int) -> list[int]:
    """The rows of a matrix that belong to a head."""
    return list(range(head * SIZE, (head + 1) * SIZE))


def plain(seen: dict, optimizer: str, kv_heads: int) -> list[dict]:
    w = {name: t.double().requires_grad_() for name, t in seen["start", kv_heads].items()}
    if optimizer == "sgd":
        update = torch.optim.SGD(w.values(), lr=0.1, momentum=0.9)
    else:
        update = torch.optim.AdamW(w.values(), lr=1e-3)
    steps = []
    for x, y in seen["batches"]:
        loss = cross_entropy(logits(w, x, kv_heads).flatten(0, 1), y.flatten())
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = sum(g.pow(2).sum() for g in gradients.values()).sqrt()
        for name, p in w.items():
            p.grad = gradients[name]
        update.step()
        after = {name: p.detach().clone() for name, p in w.items()}
        loss = loss.detach()
        steps.append({"loss": loss, "norm": norm, "gradient": gradients, "parameter": after})
    return steps


def held(name: str, tensor: torch.Tensor, rank: int, ranks: int, kv_heads: int) -> torch.Tensor:
    """What a rank should hold: the heads that its query heads need."""
    queries = [head for head in range(HEADS) if head * ranks // HEADS == rank]
    needed = sorted({head * kv_heads // HEADS for head in queries})
    rows = {"query": queries, "key": needed, "value": needed}
    kind = name.split(".")[1]
    if kind in rows:
        return tensor[[row for head in rows[kind] for row in slots(head)]]
    if kind == "out":
        return tensor[:, [column for head in queries for column in slots(head)]]
    return tensor


@pytest.mark.parametrize("layer", ["query", "out", "norm"])
def test_attention_with_biases_or_norms_is_refused(layer):
    """Their gradients, or what they add, would be wrong by the number of ranks, silently."""
    attention = grouped_query_attention.GroupedQueryAttention(dim=16, heads=4, kv_heads=2)
    attention.add_module(layer, torch.nn.RMSNorm(4) if layer == "norm" else torch.nn.Linear(16, 16))
    with pytest.raises(ValueError, match=f"{layer} is not a linear layer without bias"):
        grouped_query_attention.shard_attention(attention, kv_heads=2)


@pytest.mark.device
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_one_process(seen, optimizer, kv_heads):
    """fp32 differs from float64 by some 1e-7 for numbers of order one. AdamW divides a gradient by
    its size, so rounding in a tiny gradient becomes part of a step of lr = 1e-3."""
    tolerance = {"loss": 3e-6, "norm": 1e-5, "gradient": 2e-6, "parameter": 5e-6}
    if optimizer == "adamw":
        tolerance |= {"gradient": 2e-5, "parameter": 1e-4}
    of_ranks = seen[optimizer, kv_heads]
    for step, one in enumerate(plain(seen, optimizer, kv_heads)):
        for rank, steps in enumerate(of_ranks):
            for kind, atol in tolerance.items():
                found, wanted = steps[step][kind], one[kind]
                if isinstance(found, dict):
                    wanted = {
                        name: held(name, t, rank, len(of_ranks), kv_heads)
                        for name, t in wanted.items()
                    }
                torch.testing.assert_close(
                    found,
                    wanted,
                    rtol=0,
                    atol=atol,
                    check_dtype=False,
                    msg=lambda text, place=(step, rank, kind): f"{place}: {text}",
                )
        assert all(t.any() for t in one["gradient"].values())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ranks_that_share_a_head_keep_the_same_bits(seen, optimizer, kv_heads):
    of_ranks = seen[optimizer, kv_heads]
    copies = max(1, len(of_ranks) // kv_heads)
    for rank, steps in enumerate(of_ranks):
        for mine, first in zip(steps, of_ranks[rank - rank % copies], strict=True):
            for name in ("attention.key.weight", "attention.value.weight"):
                assert torch.equal(mine["gradient"][name], first["gradient"][name])
                assert torch.equal(mine["parameter"][name], first["parameter"][name])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_norm_knows_attention_at_any_depth(seen, kv_heads):
    norm, nested = seen["norms", kv_heads]
    assert norm == nested


def test_fewer_key_heads_than_ranks():
    """The script shows the error of ColwiseParallel, and the cure, compared with one process."""
    output = pool.run(SCRIPT, "--steps", 2, ranks=4).check().output
    error = r"RuntimeError: shape '\[2, 3, -1, 8\]' is invalid for input of size"
    assert re.search(rf"^1 key/value heads, ColwiseParallel: {error} 12$", output, re.M)
    assert re.search(rf"^2 key/value heads, ColwiseParallel: {error} 24$", output, re.M)
    assert re.search(r"^4 key/value heads, ColwiseParallel: works$", output, re.M)
    rows = re.findall(r"^ +(\d) +(\d)  (summed|not summed) +(.*)$", output, re.M)
    ways = [(1, 4, True), (1, 4, False), (2, 2, True), (2, 2, False), (4, 1, True)]
    assert [(int(kv), int(n), how == "summed") for kv, n, how, _ in rows] == ways
    for _, _, how, numbers in rows:
        first_loss, *others = map(float, numbers.split())
        assert first_loss < 1e-5
        if how == "summed":
            assert max(others) < 1e-5
        else:
            assert min(others) > 1e-2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "says"),
    [
        (6, 2, 4, "6 query heads do not divide over 4 tensor-parallel ranks"),
        (12, 4, 6, "4 key/value heads do not fit 6 tensor-parallel ranks"),
        (6, 3, 2, "3 key/value heads do not fit 2 tensor-parallel ranks"),
    ],
)
def test_what_does_not_divide_is_refused(heads, kv_heads, ranks, says):
    with pytest.raises(UserError, match=f"^{says}"):
        grouped_query_attention.check(heads, kv_heads, ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 2, 4), (8, 4, 2), (6, 3, 3), (4, 1, 1)]
)
def test_what_divides_is_not_refused(heads, kv_heads, ranks):
    grouped_query_attention.check(heads, kv_heads, ranks)


def test_heads_that_do_not_fit_are_one_sentence():
    result = pool.run(SCRIPT, "--heads", 6, "--dim", 24, "--kv-heads", 3, ranks=2)
    assert result.returncode == 2
    sentence = "error: 3 key/value heads do not fit 2 tensor-parallel ranks: one number must divide"
    assert result.output.count(sentence) == 1, result.output
    assert "Traceback" not in result.output
