"""Tensor and sequence parallelism: by hand and with DTensors, equal to one process; counted."""

import re

import pool
import pytest
import torch
from helpers import ROOT
from sequence_parallel import formula as sequence_formula
from sequence_parallel import kept_by_formula
from tensor_parallel import formula as dtensor_formula
from tensor_parallel_from_scratch import cut_dim
from tensor_parallel_from_scratch import formula as hand_formula
from workers.parallel_tensor import CASES, DTENSORS, SMALL, config_of

pytestmark = pytest.mark.slow  # each launch of ranks takes some seconds

HERE = ROOT / "parallel_basics"
BATCH, RANKS = 3, 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensor") / "results.pt"
    pool.run(ROOT / "tests/workers/parallel_tensor.py", path, ranks=RANKS, timeout=400).check()
    return torch.load(path, map_location="cpu", weights_only=False)


def check_steps(steps: list[dict], expected: list[dict], optimizer: str) -> None:
    """fp32 sums in another order: some 1e-7 for numbers of order one. AdamW divides a gradient by
    its size: rounding in a tiny gradient becomes part of a step of lr = 1e-3, at most a tenth."""
    assert len(steps) == len(expected) == 4
    tolerance = {"loss": 3e-6, "norm": 1e-5, "gradient": 2e-6, "parameter": 5e-6}
    if optimizer == "adamw":
        tolerance |= {"gradient": 2e-5, "parameter": 1e-4}
    for i, (ours, theirs) in enumerate(zip(steps, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(
                torch.as_tensor(ours[key]),
                torch.as_tensor(value),
                rtol=0,
                atol=tolerance[key.split()[0]],
                msg=lambda text, i=i, key=key: f"step {i}, {key}: {text}",
            )
    for key, value in steps[0].items():  # and there was something to learn
        assert not key.startswith("gradient") or value.any(), key
    assert any(key.startswith("parameter") for key in steps[-1])


def check_sent(sent, rows) -> None:
    """The counted calls are exactly those of the formula's rows."""
    calls, nbytes = (dict(counter) for counter in sent)
    for phase, kind, operation, expected_calls, each in rows:
        keys = [k for k in calls if k[0] == phase and k[1].endswith(kind) and k[2] == operation]
        found = sum(calls.pop(k) for k in keys), sum(nbytes.pop(k) for k in keys)
        assert found == (expected_calls, expected_calls * each), (phase, kind, operation)
    assert not calls, calls


# ---- by hand


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
@pytest.mark.parametrize("name", CASES)
def test_by_hand_equals_one_process(results, name):
    _, sizes, tied, optimizer = CASES[name]
    found = results["by hand", name]
    check_steps(found["steps"], results[sizes["dim"], tied, optimizer], optimizer)
    for other in found["ranks"][1:]:  # replicated parameters have the same bits on every rank
        for parameter, value in found["ranks"][0]["copies"].items():
            assert torch.equal(value, other["copies"][parameter]), parameter


@pytest.mark.parametrize("name", CASES)
def test_by_hand_sends_what_the_formula_says(results, name):
    ranks, sizes, *_ = CASES[name]
    rows = list(hand_formula(config_of(sizes), BATCH * sizes["length"], ranks))
    if "recompute" in name:  # backward needs attention's output again, so its sum is repeated
        layers, nbytes = sizes["layers"], 4 * BATCH * sizes["length"] * sizes["dim"]
        twice = [("backward", kind, "all_reduce", 2 * layers, nbytes) for kind in ("attention",)]
        rows = [row for row in rows if row[:2] != ("backward", "attention")] + twice
    for rank in results["by hand", name]["ranks"]:
        check_sent(rank["sent"], rows)


@pytest.mark.parametrize("name", CASES)
def test_by_hand_each_rank_holds_its_part(results, name):
    ranks, sizes, tied, optimizer = CASES[name]
    step = results[sizes["dim"], tied, optimizer][-1]
    shapes = {k.split()[1]: tuple(v.shape) for k, v in step.items() if k.startswith("parameter")}
    for rank in results["by hand", name]["ranks"]:
        assert rank["held"].keys() == shapes.keys()
        for parameter, shape in shapes.items():
            expected = list(shape)
            if (dim := cut_dim(parameter)) is not None:
                expected[dim] //= ranks
            assert rank["held"][parameter] == tuple(expected), parameter
            # A view of the full parameter would keep all of it in memory.
            assert rank["memory"][parameter] == 4 * torch.Size(expected).numel(), parameter


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
def test_operators_are_conjugate(results):
    total = sum(10.0**rank for rank in range(RANKS))
    for rank, found in enumerate(results["operators"]):
        expected = {"f": 10.0**rank, "f back": 2 * total, "g": total, "g back": 3.0}
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: [value] * 2 for name, value in expected.items()
        }


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
def test_loss_over_cut_logits(results):
    """A shift of 1e4 leaves 3 digits in fp32. The third case is bfloat16: 8 bits of gradient. The
    last one leaves targets out."""
    tolerances = ((1e-6, 1e-7), (2e-3, 1e-4), (1e-5, 1e-3), (1e-6, 1e-7))
    for found, (loss, gradient) in zip(results["losses"], tolerances, strict=True):
        torch.testing.assert_close(*found["loss"], rtol=0, atol=loss)
        torch.testing.assert_close(*found["gradient"], rtol=0, atol=gradient)


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
def test_outputs_without_gradients(results):
    found = results["outputs"]
    assert torch.equal(*found["embedded"])  # one rank's row plus zeros: the same bits
    torch.testing.assert_close(*found["logits"], rtol=0, atol=1e-6)
    torch.testing.assert_close(*found["documents"], rtol=0, atol=1e-6)  # both arguments arrive
    assert tuple(found["here"]) == (2, 12, 256 // RANKS)


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
def test_the_loss_of_a_sharded_model_with_a_padded_vocabulary(results):
    """GPT(tokens, targets), some of which are left out; the keys have biases, too."""
    found = results["padded"]
    torch.testing.assert_close(*found["loss"], rtol=0, atol=3e-6)
    torch.testing.assert_close(*found["norm"], rtol=0, atol=1e-5)


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
@pytest.mark.parametrize("end", ["query.weight", "norm.weight"])
def test_the_norm_of_a_model_with_frozen_parameters(results, end):
    expected, ours = results["frozen"][end]
    assert expected > 1e-3
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


def test_what_no_plan_fits_is_refused(results):
    plan = "this is GPT-2's plan: transformer_basics/parallelize.py has a Llama's"
    no_style = "has no style in the plan: a norm needs SequenceParallel()"
    assert results["refusals"] == {
        "heads": "heads 6 does not divide by 4 tensor-parallel ranks",
        "vocab_size": "vocab_size 258 does not divide by 4 tensor-parallel ranks",
        "kv_heads": "kv_heads 2 does not divide by 4 tensor-parallel ranks",
        "mlp_dim": "mlp_dim 9 does not divide by 4 tensor-parallel ranks",
        "norms by hand": plan,
        "norms": plan,
        "norms, sequence": plan,
        "llama by hand": plan,
        "llama": plan,
        "llama, sequence": plan,
        "length": "10 tokens do not divide by 4 ranks",
        "no style": f"token_embedding.weight {no_style}",
    }


# ---- with DTensors


@pytest.mark.device
@pytest.mark.gpu_per_rank(RANKS)  # DTensors
@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors_equal_one_process(results, name):
    optimizer = DTENSORS[name][2].split()[0]  # with "foreach" or without
    expected = results[SMALL["dim"], False, optimizer]
    check_steps(results["dtensors", name]["steps"], expected, optimizer)


def test_by_hand_equals_parallelize_module(results):
    """One model, sharded in one way by hand and with DTensors."""
    by_hand = results["by hand", "4 sgd"]["steps"]
    check_steps(results["dtensors", "cut sgd"]["steps"], by_hand, "sgd")


@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors_send_what_the_formula_says(results, name):
    sequence, cut_logits, _, by_hand = DTENSORS[name]
    config, length = config_of(SMALL), SMALL["length"]
    if sequence:
        rows = list(sequence_formula(config, BATCH, length))
        if not by_hand:  # AdamW reduces each of these gradients three times
            rows[-1] = ("optimizer", "outside", rows[-1][2], 3 * rows[-1][3], rows[-1][4])
    else:
        rows = dtensor_formula(config, BATCH * length, cut_logits)
    check_sent(results["dtensors", name]["sent"], rows)


@pytest.mark.parametrize("name", [name for name, case in DTENSORS.items() if case[1]])
def test_activations_kept_for_backward(results, name):
    expected = kept_by_formula(config_of(SMALL), BATCH * SMALL["length"], RANKS, DTENSORS[name][0])
    assert results["dtensors", name]["kept"] == expected


# ---- the scripts


def table(output: str, start: str) -> list[str]:
    """The lines from the one that begins with `start` to the next empty one."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    return lines[first : lines.index("", first) if "" in lines[first:] else None]


def numbers(line: str) -> list[float]:
    return [
        float(n.replace(",", "")) for n in re.findall(r"(?<!\w)\d[\d,]*\.?\d*(?:e-?\d+)?", line)
    ]


def check_output(output: str, rows: int) -> None:
    """In each row "counted" equals "formula"; the differences are within those of check_steps."""
    collectives = table(output, "layers   ")[1:] if "layers   " in output else []
    counted = [numbers(line)[-4:] for line in collectives if len(numbers(line)) >= 4]
    assert len(counted) >= 6 or "\n1 rank(s)" in "\n" + output  # one rank sends nothing
    for calls, expected_calls, nbytes, expected_bytes in counted:
        assert (calls, nbytes) == (expected_calls, expected_bytes)
    found = table(output, "largest difference")[1:]
    assert len(found) == rows
    for line in found:
        loss, norm, gradient, parameter = numbers(line)[-4:]
        assert max(loss / 3e-6, norm / 1e-5, gradient / 2e-5, parameter / 1e-4) < 1, line


def test_from_scratch_script():
    output = pool.run(HERE / "tensor_parallel_from_scratch.py", ranks=2).check().output
    assert "Warning" not in output
    check_output(output, rows=1)
    assert "token_embedding.weight            (256, 128)    (128, 128)   dim 0" in output
    assert "blocks.0.mlp.contract.weight      (128, 512)    (128, 256)   dim 1" in output
    held = re.search(r"of 470,272 parameters each rank holds (.*)", output)
    assert numbers(held[1]) == [240_128] * 2
    (calls, _, nbytes, _) = numbers(table(output, "all   ")[0])
    assert calls == 4 * 2 + 2 + 1
    assert nbytes == 10 * 131_072 + 4096


def test_tensor_parallel_script():
    output = pool.run(HERE / "tensor_parallel.py", ranks=2).check().output
    assert "Warning" not in output
    check_output(output, rows=2)
    assert "blocks.0.attention.query    Shard(0)       (128, 128)    (64, 128)" in output
    assert "blocks.0.attention.out      Shard(1)       (128, 128)    (128, 64)" in output
    gathered, cut, data = (numbers(line)[-1] for line in table(output, "bytes sent per rank")[1:])
    assert gathered == 10 * 131_072 + 262_144 // 2
    assert cut == 10 * 131_072 + 3072
    assert data == 4 * 470_272


def test_sequence_parallel_script():
    output = pool.run(HERE / "sequence_parallel.py", ranks=2).check().output
    assert "Warning" not in output
    check_output(output, rows=2)
    assert "without sum_gradients(), adamw calls all_reduce 30 times" in output
    plain, split = (numbers(line)[-1] for line in table(output, "bytes sent per rank")[1:])
    # It sends more: the positions' sum in forward and backward, and the norms' gradients.
    assert split - plain == 2 * 32_768 // 2 + 5120
    kept = [numbers(line) for line in table(output, "bytes that one block")[2:]]
    assert (kept[0], kept[2]) == (kept[1], kept[3])
    assert kept[2][-1] < kept[0][-1]


@pytest.mark.parametrize(
    ("ranks", "script", "options", "says"),
    [
        (3, "tensor_parallel_from_scratch", "--heads 4", "--heads 4 does not divide over 3 ranks"),
        (3, "tensor_parallel", "--heads 6 --dim 36", "--vocab-size 256 does not divide over 3"),
        (3, "sequence_parallel", "", "--length 64 does not divide over 3 ranks"),
        (1, "tensor_parallel", "--dim 100", "--dim 100 does not divide into 8 heads"),
        (
            1,
            "sequence_parallel",
            "--vocab-size 3",
            "--vocab-size: must be an integer of at least 256, not 3",
        ),
    ],
)
def test_wrong_arguments(ranks, script, options, says):
    result = pool.run(HERE / f"{script}.py", *options.split(), ranks=ranks, timeout=60)
    assert result.returncode == 2, result.output
    assert result.output.count(f"{script}.py: error: {says}") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("script", "rows"), [("tensor_parallel_from_scratch", 1), ("sequence_parallel", 2)]
)
def test_one_process_is_a_world_of_one(script, rows):
    check_output(pool.run(HERE / f"{script}.py", "--steps", 1).check().output, rows)


@pytest.mark.gpu
def test_on_a_gpu():
    output = pool.run(HERE / "tensor_parallel_from_scratch.py", "--device", "cuda").check().output
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in output
    check_output(output, rows=1)
