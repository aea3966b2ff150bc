"""transformer_basics/train.py: every mesh takes the steps of one process."""

import pytest
import torch
import warm
from helpers import ROOT
from workers.gpt_equivalence import CASES, KINDS, LR, STEPS

TRAIN = ROOT / "transformer_basics/train.py"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    script, folder = ROOT / "tests/workers/gpt_equivalence.py", tmp_path_factory.mktemp("matrix")
    for ranks in (1, 2, 4, 8):
        warm.run(script, folder / str(ranks), ranks=ranks, timeout=240).check()
    return {ranks: torch.load(folder / str(ranks)) for ranks in (1, 2, 4, 8)}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh", "kind"), CASES)
def test_mesh_equals_one_process(matrix, ranks, mesh, kind):
    expected, actual = matrix[1][kind], matrix[ranks][mesh, kind]
    assert len(actual["loss"]) == STEPS
    # fp32 sums in another order: about 1e-7 for numbers of order one, times 5 for other machines.
    # AdamW divides by the root of small squares, which magnifies that: a hundredth of a step of its
    # lr is allowed. bf16 has 8 bits: an error of 4e-3 in each number on the way.
    tolerance = {"loss": 2e-6, "norm": 2e-6, "gradients": 1e-6, "parameters": 1e-6}
    if KINDS[kind][1] == "adamw":
        tolerance["parameters"] = 1e-2 * LR
    if kind == "bf16":
        tolerance = {"loss": 1e-2, "gradients": 1e-2, "parameters": 1e-2}
    for part in ("loss", "norm"):
        assert len(actual[part]) == len(expected[part])
        for step, (a, b) in enumerate(zip(actual[part], expected[part], strict=True)):
            close(a, b, tolerance[part], f"{part} in step {step}")
    for part in ("gradients", "parameters"):  # of the first and the last step, at the end
        for found, wanted in zip(actual[part], expected[part], strict=True):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                close(found[name], tensor, tolerance[part], f"{part} {name}")


def close(actual, expected, tolerance, what):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
