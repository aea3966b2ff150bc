"""Models of torchvision and transformers in the templates: eight of them, one case each.

make foreign runs all of them, with all their variants. One job of each size trains all models, in
100 s of processor time.
"""

import ast
import functools
import json
import math
import sys

import pytest
import torch
from helpers import ROOT, python

FOREIGN = ROOT / "tests/foreign"
sys.path.append(str(FOREIGN))
from cases import Case  # noqa: E402
from records import largest  # noqa: E402
from variants import VARIANTS  # noqa: E402
from zoo import GROUPS, ZOO  # noqa: E402

CASES = (
    "ResNet, plain, sgd",
    "Llama, plain, adamw",
    "T5, tied, adamw",
    "BERT, unused, adamw",
    "GPT-2, lora, sgd",
    "Qwen2-MoE, frozen, sgd",
    "Mamba, plain, adamw",
    "CLIP, frozen, sgd",
    "Llama, stray, adamw",
    "Llama, tied in two units, adamw",
    "Llama, unused, no flag, adamw",
)
REFUSED = {  # what cannot work -> what says so
    ("CLIP, frozen, sgd", "fsdp_basics"): "logit_scale has the shape (), which FSDP does not shard",
    ("Llama, stray, adamw", "fsdp_basics"): "UserError: model.layers.0 has a tensor 'table'",
    ("Llama, tied in two units, adamw", "fsdp_basics"): "Parameter 'model.embed_tokens.weight' is",
    (
        "Llama, unused, no flag, adamw",
        "ddp_basics",
    ): "UserError: step 1: ranks 0 and 1 hold different",
}


RUNS = [(case, template) for case in CASES for template in ("ddp_basics", "fsdp_basics")]
RUNS += [("Llama, plain, adamw", "t5_finetuning"), ("T5, tied, adamw", "t5_finetuning")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("foreign") / "rows.jsonl"
    result = python(FOREIGN / "matrix.py", "--quick", "--rows", path, timeout=850)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {}
    for row in rows:
        case = f"{row['model']}, {row['variant']}, {row['optimizer']}"
        found[case, row["template"]] = row
    assert result.returncode == any(row["error"] for row in rows), result.output[-6000:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "template"), RUNS)
def test_trains_as_a_plain_loop_or_says_why_not(rows, case, template):
    """The tolerance and why: TOLERANCE in matrix.py."""
    row = rows[case, template]
    assert not row["error"]
    sentence = REFUSED.get((case, template), "")
    assert sentence in row["refused"]
    assert bool(sentence) == bool(row["refused"])
    if not sentence:
        assert max(row[kind] for kind in ("losses", "gradients", "parameters", "buffers")) < 1e-7


@pytest.mark.slow
def test_there_is_no_other_case(rows):
    assert set(rows) == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_each_variant_changes_each_model(variant):
    """Which parameters there are, which are trainable, and which are one and the same tensor."""
    for name in ZOO:
        assert described(name, variant) != described(name, "plain"), name


@functools.cache
def described(case: str, variant: str) -> dict:
    first, found = {}, {}
    for name, parameter in Case(case, variant).build().named_parameters(remove_duplicate=False):
        found[name] = parameter.requires_grad, first.setdefault(id(parameter), name)
    return found


def test_the_page_about_your_model_has_the_recorded_tables():
    record = (ROOT / "benchmarks/results/foreign.md").read_text()
    short = record.partition("## In short")[2].partition("## Each architecture")[0]
    lines = [line for line in short.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(GROUPS) + 2 + len(REFUSED)
    assert not set(lines) - set((ROOT / "docs/your_model.md").read_text().splitlines())


def test_what_differs_is_found():
    right = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3), "c": 0.5}
    assert largest({name: (value, value) for name, value in right.items()}) == (0.0, "")
    assert largest({"a": (torch.tensor([1.0, 2.2]), right["a"])}) == (pytest.approx(0.1), "a")
    for other in (None, torch.tensor([1.0]), right["a"].double()):
        assert largest({"a": (other, right["a"])})[0] == math.inf
    assert largest({"a": (right["a"], None)}) == (math.inf, "a is unexpected")
    assert largest({"a": (right["a"] * math.nan, right["a"]), "c": (0.5, 0.5)})[0] == math.inf
    zeros = torch.zeros(2)
    assert largest({"a": (zeros, zeros)}) == (0.0, "")
    assert largest({"a": (right["a"], zeros)}) == (2.0, "a")
    assert largest({"c": (0.5 + 1e-12, 0.5)})[0] > 1e-13  # in 64 bits


def test_small_numbers_count_beside_large_ones():
    large = torch.tensor([100.0])
    pairs = {"large": (large, large), "small": (torch.tensor([0.1]), torch.tensor([0.2]))}
    assert largest(pairs) == (pytest.approx(0.5), "small")


@pytest.mark.parametrize("name", ["oracle.py", "records.py", "zoo.py", "variants.py", "cases.py"])
def test_the_oracle_shares_no_code_with_the_templates(name):
    templates = {path.stem for directory in ROOT.glob("*_*/") for path in directory.glob("*.py")}
    tree = ast.parse((FOREIGN / name).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {
        alias.name for node in nodes for alias in node.names if isinstance(node, ast.Import)
    }
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in imported} & templates
