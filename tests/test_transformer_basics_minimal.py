"""transformer_basics/minimal.py against one process that knows nothing of meshes."""

import os
import re
from pathlib import Path

import minimal
import pool
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from transformers import LlamaForCausalLM

STEPS = 10  # it prints the loss after every tenth


@pytest.fixture(scope="module")
def one_process() -> dict:
    """The library's model, the same text and optimizer in a plain loop over whole batches."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(minimal.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(os.__file__).read_bytes()[:30_000]))
    found = {"gradients": [], "parameters": []}
    for _ in range(STEPS):
        starts = torch.randint(len(text) - minimal.LENGTH, (minimal.BATCH,))
        batch = torch.stack([text[i : i + minimal.LENGTH + 1] for i in starts.tolist()])
        logits = model(batch[:, :-1]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        found["gradients"].append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        found["parameters"].append([p.detach().clone() for p in model.parameters()])
    found["sizes"] = {name: p.numel() for name, p in model.named_parameters()}
    return found | {"loss": loss.item()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_minimal_equals_one_process(one_process, tmp_path, ranks):
    script = ROOT / "tests/workers/gpt_minimal.py"
    said = pool.run(script, tmp_path / "found", STEPS, ranks=ranks, timeout=240).check().output
    assert float(re.search(r"^step 10   loss (\S+)$", said, re.M)[1]) == pytest.approx(
        one_process["loss"], abs=1e-4
    )  # four digits are printed
    assert "Warning" not in said
    found = torch.load(tmp_path / "found")
    # fp32 sums in another order: about 1e-7 for numbers of order one. AdamW divides by the root of
    # small squares, which magnifies that: a hundredth of ten steps of its lr is allowed.
    for part, tolerance in (("gradients", 1e-5), ("parameters", 3e-4)):
        assert len(found[part]) == STEPS
        for ours, theirs in zip(found[part], one_process[part], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    # Each rank holds its part: of the layers of attention and MLP, its share of all ranks; of all
    # else (embedding, norms, head) its share of dp.
    sizes, dp = one_process["sizes"], ranks // 2
    cut = sum(size for name, size in sizes.items() if "_proj" in name)
    assert found["held"][0] == cut / ranks + (sum(sizes.values()) - cut) / dp
    assert found["units"] == 3  # two blocks and the root: not gathered in one piece
    # The first step, before AdamW had anything to magnify.
    torch.testing.assert_close(
        found["gradients"][0], one_process["gradients"][0], rtol=0, atol=1e-6
    )


@pytest.mark.slow
def test_minimal_learns():
    result = pool.run(ROOT / "transformer_basics/minimal.py", ranks=2, timeout=240).check()
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3
