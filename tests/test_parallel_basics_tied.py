"""parallel_basics/tied_stages.py: the tied matrix of a pipeline, compared with one process."""

import re
from types import SimpleNamespace

import pool
import pytest
import tied_stages
import torch
from arguments import UserError
from helpers import ROOT
from torch.nn.functional import cross_entropy, gelu, layer_norm

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

SCRIPT = ROOT / "parallel_basics/tied_stages.py"
MATRIX = "token_embedding.weight"
LAYERS, HEADS = 3, 4


RANKS = [pytest.param(ranks, marks=pytest.mark.gpu_per_rank(ranks)) for ranks in (2, 3)]


@pytest.fixture(scope="module", params=RANKS)
def seen(request, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("tied") / "seen.pt"
    worker = ROOT / "tests/workers/parallel_tied.py"
    pool.run(worker, path, ranks=request.param, timeout=400).check()
    return torch.load(path, map_location="cpu", weights_only=False)


def gpt(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's logits from named weights; the embedding's matrix is the head's."""
    width = w[MATRIX].shape[1]
    length = tokens.shape[1]
    hidden = w[MATRIX][tokens] + w["position_embedding.weight"][:length]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x, name):
        return layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"])

    for i in range(LAYERS):
        block = f"blocks.{i}"
        x = norm(hidden, f"{block}.attention_norm")
        q, k, v = (linear(x, f"{block}.attention.{name}") for name in ("query", "key", "value"))
        mixed = []
        for head in torch.arange(width).chunk(HEADS):
            scores = q[..., head] @ k[..., head].mT / len(head) ** 0.5
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[..., head])
        hidden = hidden + linear(torch.cat(mixed, -1), f"{block}.attention.out")
        x = linear(norm(hidden, f"{block}.mlp_norm"), f"{block}.mlp.expand")
        hidden = hidden + linear(gelu(x, approximate="tanh"), f"{block}.mlp.contract")
    return norm(hidden, "norm") @ w[MATRIX].T


def plain(start: dict, batches: list, logits, optimizer: str) -> list[dict]:
    """One process in float64: per step loss, norm, gradients before clipping, parameters after."""
    w = {name: t.double().requires_grad_() for name, t in start.items() if name != "head.weight"}
    if optimizer == "sgd":
        update = torch.optim.SGD(w.values(), lr=0.1, momentum=0.9)
    else:
        update = torch.optim.AdamW(w.values(), lr=1e-3)
    steps = []
    for x, y in batches:
        loss = cross_entropy(logits(w, x).flatten(0, 1), y.flatten())
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = sum(g.pow(2).sum() for g in gradients.values()).sqrt()
        for name, p in w.items():
            p.grad = gradients[name] / max(1, norm)
        update.step()
        after = {name: p.detach().clone() for name, p in w.items()}
        loss = loss.detach()
        steps.append({"loss": loss, "norm": norm, "gradients": gradients, "parameters": after})
    return steps


def check(ranks: list[list[dict]], expected: list[dict], optimizer: str) -> None:
    """fp32 differs from float64 by some 1e-7 for numbers of order one. AdamW divides a gradient by
    its size, so rounding in a tiny gradient becomes part of a step of lr = 1e-3."""
    tolerance = {"loss": 3e-6, "norm": 1e-5, "gradients": 2e-6, "parameters": 5e-6}
    if optimizer == "adamw":
        tolerance |= {"gradients": 2e-5, "parameters": 1e-4}
    for step, one in enumerate(expected):
        of_ranks = [rank[step] for rank in ranks]
        for kind, atol in tolerance.items():
            for mine in of_ranks:
                found, wanted = mine[kind], one[kind]
                if isinstance(found, dict):
                    wanted = {name: wanted[name] for name in found}
                torch.testing.assert_close(
                    found, wanted, rtol=0, atol=atol, check_dtype=False, msg=f"{step} {kind}"
                )
        first, last = of_ranks[0], of_ranks[-1]
        for kind in ("gradients", "parameters"):
            assert torch.equal(first[kind][MATRIX], last[kind][MATRIX])  # both have the same bits
            assert set().union(*(mine[kind] for mine in of_ranks)) == one[kind].keys()
        assert all(torch.equal(mine["norm"], first["norm"]) for mine in of_ranks)


@pytest.mark.device
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_one_process(seen, optimizer):
    expected = plain(seen["start"], seen["batches"], gpt, optimizer)
    check(seen[optimizer], expected, optimizer)
    assert expected[0]["norm"] > 1.2  # so clipping had something to do


@pytest.mark.device
@pytest.mark.parametrize("seen", RANKS[:1], indirect=True)
def test_the_smallest_model_equals_one_process(seen):
    """An embedding (10 x 4) and its transpose, with other initial values; one step of SGD."""
    first, last = seen["smallest"]
    assert not torch.equal(first["start"][MATRIX], last["start"]["head.weight"])
    expected = plain(
        first["start"], first["batches"], lambda w, x: w[MATRIX][x] @ w[MATRIX].T, "sgd"
    )
    check([first["steps"], last["steps"]], expected, "sgd")


@pytest.mark.device
def test_a_checkpoint_holds_the_matrix_once(seen):
    shapes = {name: tuple(t.shape) for name, t in seen["start"].items() if name != "head.weight"}
    assert seen["stored"] == shapes
    saved = [steps[-1]["parameters"] for steps in seen["adamw"]]
    for rank, state in enumerate(seen["loaded"]):
        for name, tensor in state.items():
            whole_name = MATRIX if name == "head.weight" else name
            assert torch.equal(tensor, saved[rank][whole_name]), name
    assert torch.equal(seen["loaded"][0][MATRIX], seen["loaded"][-1]["head.weight"])


def test_copies_that_train_alone_drift_apart():
    """The script shows the mistake and the cure: differences from one process, between copies."""
    output = pool.run(SCRIPT, "--steps", 2, ranks=2).check().output
    alone, _, tied = output.partition("two copies, gradients not summed")[2].partition("tied: ")

    def rows(text: str) -> list[list[float]]:
        return [[float(n) for n in row.split()] for row in re.findall(r"^ +\d .*", text, re.M)]

    assert len(rows(alone)) == len(rows(tied)) == 2
    for step, _, loss, norm, gradient, parameter, apart in rows(alone):
        assert (loss > 1e-3) == (step > 1)
        assert min(norm, gradient, parameter, apart) > 1e-3
    for _, _, loss, norm, gradient, parameter, apart in rows(tied):
        assert max(loss, norm, gradient, parameter) < 1e-5
        assert apart == 0


@pytest.mark.parametrize(
    ("stages", "changes", "says"),
    [
        (1, {}, "one rank holds both uses of the matrix: start at least two with torchrun"),
        (4, {}, "--layers 3 are too few for 4 stages: one each"),
        (2, {"batch_size": 6}, "--batch-size 6 does not divide into 4 micro-batches"),
        (2, {"microbatches": 1}, "--microbatches 1 do not fill 2 stages"),
    ],
)
def test_what_does_not_fit_is_refused(stages, changes, says):
    args = SimpleNamespace(**{"layers": 3, "batch_size": 8, "microbatches": 4} | changes)
    with pytest.raises(UserError) as error:
        tied_stages.check(args, stages)
    assert str(error.value) == says


def test_one_rank_is_one_sentence():
    result = pool.run(SCRIPT)
    assert result.returncode == 2
    assert "error: one rank holds both uses of the matrix" in result.output
    assert "Traceback" not in result.output
