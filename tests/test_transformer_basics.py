"""transformer_basics/train.py: every mesh takes the steps of one process."""

import json
import math
import os
import re
import runpy
import shutil
import sys
from functools import partialmethod
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import benchmark
import config
import data
import numpy as np
import pool
import pytest
import text_files
import torch
from activation_checkpointing import apply_activation_checkpointing
from arguments import UserError
from config import AXES, Settings
from data import Batches, bigram_loss
from evaluation import held_out_windows
from flags import parse_args
from helpers import ROOT, python, read_metrics, torchrun
from hugging_face import from_hugging_face, their_config, to_hugging_face
from model import GPT, GPTConfig, cross_entropy, initialize
from on_demand import OnDemand
from optimizer import schedule, set_learning_rate
from parallelize import apply_compile, apply_tensor_parallel
from pipeline import Pipeline
from pretrained import copy_weights, read_config, read_weights
from runtime import Worker
from sampling import generate
from shards import Shard
from stages import head_in_blocks, stage_layers
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from workers.gpt_equivalence import (
    CASES,
    COMPILED,
    KINDS,
    LENGTH,
    LR,
    QUICK,
    STEPS,
    one_process,
)

FOLDER = ROOT / "transformer_basics"
TRAIN = FOLDER / "train.py"
# A small run: the corpus is two files of the reader's own.
TINY = (
    *("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8),
    *("--steps", 8, "--log-every", 1, "--eval-every", 4, "--eval-batches", 2),
    *("--checkpoint-every", 4, "--sample", 12),
)


@pytest.fixture(scope="module")
def reference():
    return OnDemand(one_process)


def on_meshes(folder, ranks: int, cases: str, timeout: float = 240) -> dict:
    script = ROOT / "tests/workers/gpt_equivalence.py"
    said = pool.run(script, folder / "found", cases, ranks=ranks, timeout=timeout).check().output
    # On GPUs, PyTorch 2.13 hands NCCL's options to Gloo when it splits a group of both.
    said = re.sub(r".*ProcessGroupGloo::split.*", "", said)
    assert "Warning" not in said
    return torch.load(folder / "found", map_location="cpu")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, reference):
    def run(ranks: int) -> dict:
        folder = tmp_path_factory.mktemp("matrix")
        return reference if ranks == 1 else on_meshes(folder, ranks, "all")

    return OnDemand(run)


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "kind"),
    [pytest.param(*case, marks=pytest.mark.gpu_per_rank(case[0])) for case in CASES],
)
def test_mesh_equals_one_process(matrix, ranks, mesh, kind):
    equals_one_process(matrix[1][kind], matrix[ranks][mesh, kind], kind)
    flags_do_something(matrix[1][kind], matrix[ranks][mesh, kind], ranks, mesh, kind)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return on_meshes(tmp_path_factory.mktemp("compiled"), 2, "release")


@pytest.mark.device
@pytest.mark.release
@pytest.mark.gpu_per_rank(2)
@pytest.mark.parametrize(("mesh", "kind"), COMPILED)
def test_a_compiled_mesh_equals_one_process(compiled, reference, mesh, kind):
    equals_one_process(reference[kind], compiled[mesh, kind], kind)
    flags_do_something(reference[kind], compiled[mesh, kind], 2, mesh, kind)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return on_meshes(tmp_path_factory.mktemp("quick"), 2, "quick")


@pytest.mark.device
@pytest.mark.gpu_per_rank(2)
@pytest.mark.parametrize("mesh", QUICK[2])
def test_one_mesh_of_each_strategy_equals_one_process(quick, reference, mesh):
    for kind in QUICK[2][mesh]:
        equals_one_process(reference[kind], quick[mesh, kind], kind)


def equals_one_process(expected: dict, actual: dict, kind: str) -> None:
    # fp32 sums in another order: about 1e-7 for numbers of order one, times 5 for other machines.
    # AdamW divides by the root of small squares, which magnifies that: a hundredth of a step of its
    # lr is allowed. bf16 has 8 bits: an error of 4e-3 in each number on the way.
    tolerance = {"loss": 2e-6, "norm": 2e-6, "gradients": (1e-6, 1e-6), "parameters": (1e-6,)}
    if KINDS[kind][1] == "adamw":
        tolerance["parameters"] = (1e-2 * LR,)
    # Of two e4m3 numbers that are equally near, rounding decides by the last bit of fp32. One such
    # number changed gradients of the first step by 1e-5, and of the last by 1e-4, when its change
    # had grown. A wrong scale changes those of the first step by more than 1e-4.
    if "fp8" in kind:
        tolerance = {"loss": 1e-4, "norm": 1e-3, "gradients": (2e-5, 2e-4), "parameters": (5e-5,)}
    if "bf16" in kind:
        tolerance = {"loss": 1e-2, "norm": 2e-2, "gradients": (1e-2, 1e-2), "parameters": (1e-2,)}
    for part in ("loss", "norm"):
        assert len(actual[part]) == len(expected[part]) == STEPS
        for step, (a, b) in enumerate(zip(actual[part], expected[part], strict=True)):
            close(a, b, tolerance[part], f"{part} in step {step}")
    for part in ("gradients", "parameters"):  # of the first and the last step, at the end
        pairs = zip(actual[part], expected[part], tolerance[part], strict=True)
        for found, wanted, limit in pairs:
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                close(found[name], tensor, limit, f"{part} {name}")


def close(actual, expected, tolerance, what):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def flags_do_something(expected: dict, found: dict, ranks: int, mesh: str, kind: str) -> None:
    """A flag without effect would equal one process, too."""
    words = mesh.split()
    sizes = {word: int(n) for word, n in pairwise(words) if n.isdigit()}
    stages, parts = sizes.get("--pp", 1), sizes.get("--dp-shard", 1) * sizes.get("--tp", 1)
    parts *= sizes.get("--cp", 1)
    layers = 5 if "--layers 5" in KINDS[kind][0] else 2
    share_of_stage = math.ceil(layers / stages) / layers  # the first stages have one layer more
    all_numbers = sum(p.numel() for p in expected["parameters"][0].values())
    # Norms, some biases, and keys and values of fewer heads than ranks are not sharded by tp; the
    # first stage has the embeddings, too.
    fair, tp = all_numbers * share_of_stage / parts, sizes.get("--tp", 1)
    if int(dict(pairwise(KINDS[kind][0].split())).get("--kv-heads", tp)) < tp:
        keys = [p for name, p in expected["parameters"][0].items() if "key.w" in name]
        fair += 2 * sum(p.numel() for p in keys) * share_of_stage * (tp - 1) / parts
    assert 0.8 * fair <= found["held"] <= 1.25 * fair
    is_compiled = "--compile" in words
    assert found["loss_is_compiled"] == (is_compiled and "--loss-parallel" not in words)
    # Neighbours on the last axis, of tensor parallelism, are neighbours in rank: they talk most.
    assert (found["axes"], found["ranks"]) == (AXES, [*range(ranks)])
    assert not found["had_memory"]  # before it was cut
    if "--pp" not in words:  # rank 0 has the first stage, and the last has the logits
        assert found["logits_are_cut"] == ("--loss-parallel" in words)
    if is_compiled:
        assert found["mlp_calls"] == 0  # each was of compiled code
    else:
        tokens = LENGTH / sizes.get("--cp", 1)
        assert found["tokens"] == tokens / (sizes["--tp"] if "--sequence-parallel" in words else 1)
        microbatches = sizes.get("--accumulate", sizes.get("--pp", 1))
        every = sizes.get("--activation-checkpointing", 1)  # of 2: the second block, not the first
        computed = 2 if "--activation-checkpointing" in words and every == 1 else 1
        # (A pipeline begins with one more, to learn the shapes that its stages send.)
        extra = found["mlp_calls"] - STEPS * microbatches * computed
        assert extra == 0 or (extra == 1 and "--pp" in words)


@pytest.mark.slow
def test_keep_gathered_does_so(matrix):
    assert matrix[2]["kept"] == [False, True]


@pytest.mark.slow
def test_gradients_are_reduced_unit_by_unit_from_the_head_on(matrix):
    """In fp32 with bf16, too; the head's come first, while the blocks' are still to be computed."""
    parameters = matrix[1]["sgd"]["parameters"][0]

    def nbytes(*beginnings: str) -> int:
        return 4 * sum(p.numel() for name, p in parameters.items() if name.startswith(beginnings))

    block_1, block_0 = nbytes("blocks.1"), nbytes("blocks.0")
    units = [nbytes("norm", "head"), block_1, block_0, nbytes("token_", "position_")]
    found = matrix[2]["reductions"]
    for flags in ("", "--accumulate 4 --reduce-once", "--precision bf16"):
        assert found[flags] == units, flags
    assert found["--accumulate 4"] == 4 * units  # no rank keeps them whole in between
    # A tied weight is the embedding's and the head's: its gradient is complete at the end.
    root = nbytes("token_", "position_", "norm")
    assert found["--tied"] == [block_1, block_0, root]


@pytest.mark.slow
def test_a_pipeline_gathers_once_in_a_step(matrix):
    """Of embeddings and block of its stage, not once more for each of four micro-batches."""
    assert matrix[4]["gatherings"] == 2


@pytest.mark.slow
def test_matrix_compares_something(matrix):
    one = matrix[1]
    assert all(norm > 0.1 + 1e-3 for norm in one["clip"]["norm"])  # so clipping clips
    gradients = one["clip"]["gradients"][0].values()
    assert sum(g.square().sum() for g in gradients).sqrt() == pytest.approx(0.1, rel=1e-4)
    assert "head.weight" not in one["tied"]["parameters"][0]  # it is token_embedding.weight
    assert matrix[2]["--tp 2", "bf16"]["loss"] != matrix[2]["--tp 2", "sgd"]["loss"]


# ---- the model


CONFIG = GPTConfig(vocab_size=50, block_size=32, layers=2, heads=4, dim=24)


@pytest.fixture(scope="module")
def hugging_face():
    """transformers' GPT-2 of the same size, with random values everywhere, key biases too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def test_it_is_gpt2(hugging_face):
    tokens = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = hugging_face(tokens).logits
    ours = GPT(CONFIG)

    def from_theirs():
        read = hugging_face.state_dict().__getitem__
        return {name: from_hugging_face(name, read, CONFIG) for name in ours.state_dict()}

    ours.load_state_dict(from_theirs())
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=0)
    hugging_face.load_state_dict(to_hugging_face(ours.state_dict(), CONFIG))
    torch.testing.assert_close(hugging_face(tokens).logits, expected, atol=1e-5, rtol=0)
    again = from_theirs()
    assert all(torch.equal(again[name], value) for name, value in ours.state_dict().items())


@pytest.fixture(scope="module")
def pretrained_folder(hugging_face, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    hugging_face.save_pretrained(folder)
    return folder


def fitting(folder, **other) -> Settings:
    sizes = {"layers": 2, "heads": 4, "dim": 24, "block_size": 32}
    return Settings(**sizes | {"init_from": str(folder)} | other)


def test_init_from_has_the_same_logits(hugging_face, pretrained_folder):
    tokens = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
    settings = fitting(pretrained_folder, block_size=20)  # shorter than theirs: fits
    model = GPT(read_config(settings, token_count=50))
    copy_weights(model, read_weights(settings, model.config))
    expected = hugging_face(tokens).logits
    logits = model(tokens)
    torch.testing.assert_close(logits[..., :50], expected, atol=1e-5, rtol=0)
    assert (logits[..., 50:] == -math.inf).all()  # 14 rows more, to divide by --tp
    assert logits.shape == (3, 20, 64)
    assert not model.token_embedding.weight[50:].any()


@pytest.mark.parametrize(("asked", "tp", "rows"), [(None, 1, 320), (None, 3, 384), (258, 1, 258)])
def test_a_vocabulary_is_padded_to_divide(asked, tp, rows):
    config = Settings(pad_vocab_to=asked, tp=tp).padded_model(257)
    assert (config.vocab_size, config.token_count) == (rows, 257)


def test_rows_that_pad_the_vocabulary_have_no_loss_no_gradient_and_no_sample():
    config = GPTConfig(40, 16, 1, 2, 16, token_count=37)
    model, plain = GPT(config), GPT(GPTConfig(40, 16, 1, 2, 16))
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(37, (4, 16), generator=torch.Generator().manual_seed(1))
    loss = cross_entropy(model(tokens), tokens)
    expected = torch.nn.functional.cross_entropy(
        plain(tokens)[..., :37].reshape(-1, 37), tokens.flatten()
    )
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    loss.backward()
    assert torch.equal(model.head.weight.grad[37:], torch.zeros(3, 16))
    with torch.no_grad():
        model.head.weight[37:] = 1e3  # likelier than all tokens, or less likely
    sample = generate(model, None, tokens[:, :4], count=30, temperature=50.0, top_k=0)
    assert sample.max() < 37


@pytest.mark.slow
def test_init_from_on_meshes(hugging_face, pretrained_folder, tmp_path):
    tokens = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, tmp_path / "tokens")
    models = {"gpt2": hugging_face, "qwen3": tiny_qwen3(tmp_path / "qwen3")}
    # One head of keys and values: on each of two tensor-parallel ranks.
    qwen3 = {"architecture": "llama", "kv_heads": 1, "mlp_dim": 40, "qk_norm": True}
    qwen3 |= {"init_from": str(tmp_path / "qwen3"), "norm_eps": 1e-6, "head_dim": 16}
    torch.save({"gpt2": {"init_from": str(pretrained_folder)}, "qwen3": qwen3}, tmp_path / "cases")
    pool.run(ROOT / "tests/workers/gpt_pretrained.py", tmp_path, ranks=2).check()
    on_meshes = torch.load(tmp_path / "logits")
    meshes = ("--tp 2", "--dp-shard 2", "--pp 2")
    assert on_meshes.keys() == {(model, mesh) for model in models for mesh in meshes}
    for (model, _), logits in on_meshes.items():
        assert logits.shape[-1] == 64
        expected = models[model](tokens).logits
        torch.testing.assert_close(logits[..., :50], expected, atol=1e-5, rtol=0)


def tiny_qwen3(folder):
    """With random values everywhere, saved in several files."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_position_embeddings": 32, "hidden_size": 24, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    settings = Qwen3Config(**sizes, intermediate_size=40, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(settings).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=p.dim() == 1, std=0.2)
    model.save_pretrained(folder, max_shard_size="15KB")
    return model


@pytest.mark.parametrize(
    ("other", "token_count", "message"),
    [
        ({"layers": 3}, 50, "it fits --layers 2 --heads 4 --dim 24 --block-size 32"),
        ({"block_size": 64}, 50, "--block-size 32"),
        ({"tied": True}, 50, "give --no-tied"),
        ({}, 256, "knows 50 tokens, the text has 256: give --tokenizer"),
        ({"init_from": "/nowhere/gpt2"}, 50, "cannot load --init-from /nowhere/gpt2"),
    ],
)
def test_init_from_refuses_what_does_not_fit(pretrained_folder, other, token_count, message):
    with pytest.raises(UserError, match=message):
        read_config(fitting(pretrained_folder, **other), token_count)


@pytest.mark.parametrize(
    ("key", "value"), [("activation_function", "relu"), ("n_inner", 7), ("model_type", "opt")]
)
def test_init_from_refuses_what_computes_something_else(pretrained_folder, tmp_path, key, value):
    theirs = json.loads((pretrained_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(theirs | {key: value}))
    with pytest.raises(UserError, match=str(value)):
        read_config(fitting(tmp_path), token_count=50)


LLAMA = {"architecture": "llama", "kv_heads": 2, "head_dim": 8, "mlp_dim": 40}


@pytest.mark.parametrize("shape", [{}, LLAMA])
def test_flops_are_those_of_the_matrix_products(shape):
    from torch.utils.flop_counter import FlopCounterMode

    config = GPTConfig(vocab_size=50, block_size=32, layers=2, heads=4, dim=24, **shape)
    model, tokens = GPT(config), torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    # The counter has attention's products on this device or it has not: all else is 6 a weight.
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n
    )
    attention = 12 * 2 * 32 * (4 * 8 if shape else 24)
    assert config.flops_per_token(32) == 6 * weights + attention
    assert counter.get_total_flops() >= 0.9 * 64 * 6 * weights


def test_stages_together_are_the_model():
    whole = initialize(GPT(CONFIG), seed=3)
    parts = [initialize(GPT(CONFIG, layers), seed=3) for layers in (range(1), range(1, 2))]
    named = {name: p for part in parts for name, p in part.named_parameters()}
    assert named.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(named[name], p) for name, p in whole.named_parameters())
    tokens = torch.arange(20)[None]
    assert torch.equal(parts[1](parts[0](tokens)), whole(tokens))


def test_the_head_costs_as_much_as_its_products():
    """By hand, of a token: 2 per weight in forward, 4 in backward; 12 T C of a block for scores."""
    config = GPTConfig(vocab_size=500, block_size=64, layers=7, heads=2, dim=10)
    assert head_in_blocks(config) == 6 * 10 * 500 / (6 * 12 * 10**2 + 12 * 64 * 10)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab_size", [1, 500, 2_000, 9_000])
def test_no_other_division_of_the_layers_has_a_faster_slowest_stage(stages, vocab_size):
    config = GPTConfig(vocab_size=vocab_size, block_size=64, layers=11, heads=2, dim=10)
    head = 6 * 10 * vocab_size / (6 * 12 * 10**2 + 12 * 64 * 10)

    def slowest(sizes) -> float:
        return max([*sizes[:-1], sizes[-1] + head])

    found = stage_layers(config, stages)
    assert [i for layers in found for i in layers] == list(range(11))
    all_sizes = [s for s in product(range(1, 12), repeat=stages) if sum(s) == 11]
    best = min(map(slowest, all_sizes))
    assert slowest([len(layers) for layers in found]) == best
    if stages == 3:  # the head is as long as 0.004, 2, 8 and 36 blocks
        expected = {1: (4, 4, 3), 500: (5, 4, 2), 2_000: (5, 5, 1), 9_000: (5, 5, 1)}
        assert tuple(map(len, found)) == expected[vocab_size]


@pytest.mark.parametrize("is_first", [True, False])
def test_pipeline_takes_windows_of_other_tensors(is_first):
    """torch 2.11's stages refuse what is not contiguous, such as the inputs `tokens[:, :-1]`."""
    passed = []

    class Schedule:
        def step(self, *inputs, target=None, losses=None, return_outputs=True):
            assert not return_outputs  # the logits of all micro-batches, kept and put together
            passed.extend([*inputs, target])

    pipeline = Pipeline.__new__(Pipeline)  # without the ranks that its stages need
    pipeline.model = SimpleNamespace(is_first=is_first, is_last=not is_first)
    pipeline.schedule, pipeline.device, pipeline.in_chunks = Schedule(), "cpu", False
    tokens = torch.arange(20).view(2, 10)
    x, y = tokens[:, :-1], tokens[:, 1:]
    assert not x.is_contiguous()
    pipeline.train(x, y, y.numel())
    (used,) = (tensor for tensor in passed if tensor is not None)
    assert used.is_contiguous()
    assert torch.equal(used, x if is_first else y)


# ---- the data


def one_document(tokens: np.ndarray) -> list[Shard]:
    return [Shard(tokens, np.zeros(1, np.int64))]


def test_ranks_share_the_batches_of_one_process():
    tokens = one_document(np.arange(1000, dtype=np.uint16))
    one, ranks = Batches(tokens, 9, 6, seed=0), [Batches(tokens, 9, 6, seed=0) for _ in range(3)]
    seen = []
    for step in range(2 * one.per_epoch):
        x, y = one.get(step, 0, 1)
        assert x.shape == y.shape == (6, 9)
        assert torch.equal(x + 1, y)
        parts = [rank.get(step, i, 3) for i, rank in enumerate(ranks)]
        for i, (a, b) in enumerate(parts):
            assert torch.equal(a, x[i::3])
            assert torch.equal(b, y[i::3])
        seen.append(x[:, 0].tolist())
    first, second = (sum(seen[i * one.per_epoch :][: one.per_epoch], []) for i in range(2))  # noqa: RUF017
    assert len(set(first)) == len(first) == one.per_epoch * 6  # none twice in an epoch
    assert first != second
    assert torch.equal(one.get(3, 0, 1)[0], Batches(tokens, 9, 6, seed=0).get(3, 0, 1)[0])


class Mesh(dict):
    """As much of a mesh as the data asks for: one axis of copies, and the others of one rank."""

    def __init__(self, rank: int, ranks: int):
        one, all_ranks = self.axis(0, 1), self.axis(rank, ranks)
        super().__init__(dp_replicate=all_ranks, dp_shard=one)

    @staticmethod
    def axis(rank: int, size: int):
        return SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size)


def test_batches_from_a_step_on():
    batches = Batches(one_document(np.arange(1000, dtype=np.uint16)), 9, 6, seed=0)
    found = list(batches.from_step(15, 21, Mesh(1, 2), torch.device("cpu")))
    assert len(found) == 6  # from the end of one epoch into the next
    for step, (x, y) in enumerate(found, start=15):
        expected_x, expected_y = batches.get(step, 1, 2)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_batches_for_gpus_are_pinned(monkeypatch):
    """Else copying them would wait, for the GPU and for the copy."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: calls.append("pinned") or t)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, _, non_blocking=False: calls.append(non_blocking) or t
    )
    batches = Batches(one_document(np.arange(1000, dtype=np.uint16)), 9, 6, seed=0)
    list(batches.from_step(0, 1, Mesh(0, 1), SimpleNamespace(type="cuda")))
    assert calls == ["pinned", "pinned", True, True]


def test_split_by_document():
    documents = [(f"{i}.py", b"x" * i) for i in range(1, 50)]
    train, held_out = text_files.split(documents)
    assert len(held_out) == 3
    assert sorted(map(len, train + held_out)) == list(range(1, 50))
    (train,), (held_out,) = text_files.split([("one", b"a line\n" * 100)])
    assert train + held_out == b"a line\n" * 100
    assert train.endswith(b"\n")
    assert 30 <= len(held_out) < 50
    few = [("train.txt", b"x\n" * 500), ("notes.txt", b"y\n" * 5), ("line.txt", b"t\n" + b"z" * 90)]
    train, held_out = text_files.split(few)  # of each its last part, whatever its size
    assert [a + b for a, b in zip(train, held_out, strict=True)] == [text for _, text in few]
    parts = zip(train, held_out, strict=True)
    assert all(0.04 < len(last) / len(first + last) <= 0.1 for first, last in parts)


def test_each_user_has_a_folder_for_tokens(monkeypatch):
    """Else the second user of a machine may not write into the folder of the first."""
    folders = set()
    for user in (1, 2):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        folders.add(runpy.run_path(text_files.__file__)["CACHE"])
    assert len(folders) == 2


def test_bigram_loss_by_hand():
    tokens = np.array([0, 1, 0, 1, 0, 2], dtype=np.uint8)
    x, y = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    # After 0: 1 twice and 2 once, and one for each of three: 3/6. After 1: 0 twice: 3/5.
    expected = -(np.log(3 / 6) + np.log(3 / 5)) / 2
    assert bigram_loss(one_document(tokens), x, y, 3) == pytest.approx(expected)


@pytest.fixture
def one_rank(monkeypatch, tmp_path):
    monkeypatch.setattr(text_files, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(text_files, "once_per_node", lambda action, worker: action())
    monkeypatch.setattr(data, "together", lambda action: action())
    monkeypatch.setattr(data, "check_same_text", lambda checksum, worker: None)
    return Worker(0, 0, 1, torch.device("cpu"))


def test_tokens_are_mapped_and_written_once(one_rank, tmp_path):
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text(f"\u00e4: the text of {file.name}")
    corpus = data.load_corpus(files, None, one_rank)
    assert all(isinstance(shard.tokens, np.memmap) for shard in corpus.train + corpus.validation)
    texts = texts_of(corpus).split(b"\0")[:4]  # two for training, and the last part of each
    assert [texts[0] + texts[2], texts[1] + texts[3]] == [file.read_bytes() for file in files]
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("x \u00e4")) == "x \u00e4"
    before = written(tmp_path / "cache")
    assert len(before) == 5  # tokens and borders of two shards, and the index
    data.load_corpus(files, None, one_rank)
    assert before == written(tmp_path / "cache")
    files[0].write_text("another text")
    assert b"another" in texts_of(data.load_corpus(files, None, one_rank))


def texts_of(corpus: data.Corpus) -> bytes:
    shards = corpus.train + corpus.validation
    return b"".join(shard.tokens.astype(np.uint8).tobytes() for shard in shards)


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}


def test_bad_data(one_rank, tmp_path):
    (tmp_path / "empty").touch()
    for name, message in (("nowhere", "there is no file"), ("empty", "is empty")):
        with pytest.raises(UserError, match=message):
            data.load_corpus([tmp_path / name], None, one_rank)
    with pytest.raises(UserError, match="cannot load --tokenizer"):
        data.load_tokenizer(str(tmp_path / "no tokenizer"))
    with pytest.raises(UserError, match=r"too short: 100 tokens are no batch of 8.* give more"):
        Batches(one_document(np.zeros(100, np.uint16)), 16, 8, 0)
    settings = Settings(block_size=16, batch_size=8)
    with pytest.raises(UserError, match=r"held-out text is too short: 100 tokens are no batch"):
        held_out_windows(one_document(np.zeros(100, np.uint16)), settings)
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 200_000_001)  # sparse
    with pytest.raises(UserError, match=r"for more than 200 MB run `python prepare\.py"):
        data.load_corpus([tmp_path / "large"], None, one_rank)


# ---- the arguments


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--tp 2", 3, "--dp-replicate 1 x --dp-shard 1 x --cp 1 x --tp 2 do not multiply to the 3"),
        ("--tp 2", 1, "do not multiply to the 1 rank"),
        ("--pp 2 --dp-shard 2 --tp 2 --dp-replicate 2", 8, "do not multiply to the 8"),
        ("--tp 3", 3, "--heads 4 does not divide by 3"),
        ("--kv-heads 3", 1, "--heads 4 does not divide by 3 (--kv-heads)"),
        ("--tp 4 --heads 12 --kv-heads 6", 4, "--kv-heads 6 does not fit --tp 4: one must divide"),
        ("--tp 2 --mlp-dim 33", 2, "--mlp-dim 33 does not divide by 2 (--tp)"),
        ("--architecture llama --head-dim 3", 1, "--head-dim 3 is odd"),
        ("--qkv-bias", 1, "--qkv-bias needs --architecture llama"),
        ("--rope-theta 500", 1, "--rope-theta and --rope-scaling need --architecture llama"),
        ("--pp 2 --accumulate 1", 2, "--accumulate 1 micro-batches do not fill --pp 2 stages"),
        ("--pp 4 --layers 3", 4, "--layers 3 are too few for --pp 4"),
        ("--pp 2 --schedule interleaved", 2, "--layers 3 are too few for --pp 2 with 4 stages"),
        ("--pp 2 --layers 4 --schedule zero-bubble --compile", 2, "takes no --activation-checkpoi"),
        ("--schedule zero-bubble", 1, "--schedule zero-bubble needs --pp"),
        ("--pp 2 --stages-per-rank 2", 2, "1f1b and --stages-per-rank 2 do not fit"),
        (
            "--pp 2 --schedule interleaved --layers 4 --accumulate 5 --batch-size 5",
            2,
            "--accumulate 5 does not divide into 2 rounds",
        ),
        ("--dp-shard 3", 3, "--batch-size 16 does not divide by 3"),
        ("--dim 30", 1, "--dim 30 does not divide by 4"),
        ("--tp 2 --sequence-parallel --block-size 33", 2, "--block-size 33 does not divide by 2"),
        ("--loss-parallel", 2, "need --tp"),
        ("--cp 2 --document-masks", 2, "--cp does not work with --document-masks"),
        ("--cp 2 --block-size 34", 2, "--block-size 34 does not divide by 4 (two chunks per --cp"),
        (
            "--cp 2 --tp 4 --sequence-parallel --block-size 36",
            8,
            "--block-size 36 does not divide by 8 (two chunks per --cp rank, sharded by --tp)",
        ),
        ("--cp 2 --window 5", 2, "--cp does not work with --window"),
        (
            "--cp 2 --activation-checkpointing selective",
            2,
            "--activation-checkpointing selective does not work with --cp",
        ),
        ("--cp-kernel torch", 2, "--cp-kernel torch needs --cp"),
        ("--flex-attention", 1, "--flex-attention needs --document-masks or --window"),
        ("--flex-attention --window 256 --cp 2", 2, "--cp does not work with --flex-attention"),
        ("--flex-attention --window 9 --block-size 120", 1, "--block-size that 128 divides"),
        ("--flex-attention --window 9 --head-dim 8", 1, "heads of at least 16 numbers: here 128"),
        (
            "--flex-attention --document-masks --activation-checkpointing selective",
            1,
            "does not work with --activation-checkpointing selective",
        ),
        ("--tp 2 --loss-chunks 4", 2, "--loss-chunks with --tp needs --loss-parallel"),
        ("--activation-checkpointing 0", 1, "must be full, selective, or an integer of at least 1"),
        ("--activation-checkpointing 4", 1, "4 recomputes none of the 3 blocks"),
        ("--activation-checkpointing some", 1, "must be full, selective, or an integer of at"),
        ("--steps 0", 1, "--steps: must be an integer of at least 1, not 0"),
        ("--lr nan", 1, "--lr: must be a number above 0, not nan"),
        ("--timeout 0", 1, "--timeout: must be a number above 0, not 0"),
        ("--profile", 1, "--profile needs an --output-dir"),
        ("--keep 3", 1, "--keep needs an --output-dir"),
        ("--async-save", 1, "--async-save needs an --output-dir"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, capsys, flags, ranks, message):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        parse_args()
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_activation_checkpointing_without_a_value_is_full(monkeypatch):
    modes = {"": None, " --seed 1": "full", " full": "full", " selective": "selective", " 3": 3}
    for value, mode in modes.items():
        flag = "--activation-checkpointing" if value else ""
        monkeypatch.setattr(sys, "argv", ["train.py", *(flag + value).split()])
        assert parse_args().activation_checkpointing == mode


@pytest.mark.parametrize("mode", ["full", "selective", 1])
def test_blocks_that_recompute_are_compiled_too(monkeypatch, mode):
    """torch.compile reads no call of `checkpoint` itself: without an error, it compiles nothing."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_with = partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    model = apply_compile(apply_activation_checkpointing(GPT(GPTConfig(layers=2, dim=8)), mode))
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert len(graphs) == 1  # both blocks have the same code


def test_every_second_block_is_recomputed():
    model = apply_activation_checkpointing(GPT(GPTConfig(layers=5, dim=8)), 2)
    calls = []
    for i, block in model.blocks.items():
        block.mlp.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert calls == [*"01234", *"31"]


def test_lengths_in_tokens(monkeypatch, capsys):
    flags = "--batch-size 4 --block-size 10 --tokens 1001 --eval-tokens 100"
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    settings = parse_args()
    assert (settings.steps, settings.eval_every) == (26, 2)  # 1001 / 40, up; 100 / 40, rounded
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split(), "--steps", "3"])
    with pytest.raises(SystemExit):
        parse_args()
    assert "--steps: not allowed with argument --tokens" in capsys.readouterr().err


def test_learning_rate():
    settings = Settings(warmup=0.1, steps=100)
    factors = [schedule(step, settings) for step in range(100)]
    assert factors[0] == 0.1
    assert max(factors) == factors[9] == 1
    assert 0.1 < factors[-1] < 0.102
    assert factors[10:] == sorted(factors[10:], reverse=True)
    # Each group has a rate of its own, and keeps its distance to the others'.
    numbers = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(numbers, (0.5, 0.05, 4.0), strict=True)]
    optimizer = torch.optim.SGD(groups)
    for step in (0, 50, 99, 9):
        said = set_learning_rate(optimizer, step, settings)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx(
            [0.5 * factors[step], 0.05 * factors[step], 4 * factors[step]]
        )
        assert said == rates[0]
    assert rates == [0.5, 0.05, 4.0]


def test_identity_is_all_that_changes_what_is_computed():
    """A flag that is new belongs to it, unless someone has decided otherwise."""
    fields = set(vars(Settings()))
    assert fields >= config.MAY_CHANGE
    assert fields - config.MAY_CHANGE == {
        *(
            "tokenizer",
            "document_masks",
            "layers",
            "heads",
            "dim",
            "block_size",
            "tied",
            "batch_size",
            "lr",
        ),
        *("warmup", "weight_decay", "clip", "precision", "seed", "architecture", "kv_heads"),
        *(
            "head_dim",
            "mlp_dim",
            "qk_norm",
            "qkv_bias",
            "window",
            "norm_eps",
            "rope_theta",
            "rope_scaling",
        ),
        *("dropout", "lora_rank", "lora_alpha", "fp8"),
    }
    assert Settings().identity().keys() == fields - config.MAY_CHANGE


# ---- the whole script


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("argparse", "json.decoder", "textwrap"):
        text = Path(sys.modules[name].__file__).read_bytes()[:9000]
        (folder / f"{name}.py").write_bytes(text)
    return sorted(folder.iterdir())


def run(corpus, folder, flags: str, ranks: int, stop: int = 0) -> str:
    script = ROOT / "tests/workers/gpt_resume.py"
    args = (*TINY, "--output-dir", folder, "--data", *corpus, *flags.split())
    return pool.run(script, stop, *args, ranks=ranks).check().output


def losses(folder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def held_out(folder) -> list[float]:
    return [line["validation_loss"] for line in read_metrics(folder) if "validation_loss" in line]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(corpus, folder, "", ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "--tp 2 --sequence-parallel"), (2, "--tp 2 --sequence-parallel")),
        ((2, "--pp 2"), (2, "--dp-shard 2")),
        ((4, "--dp-shard 2 --tp 2"), (1, "")),
        ((4, "--dp-shard 2 --cp 2"), (2, "--cp 2 --reduce-once")),
        ((4, "--pp 2 --cp 2"), (1, "")),
        ((1, ""), (4, "--pp 2 --tp 2 --sequence-parallel --loss-parallel")),
    ],
)
def test_a_run_moves_to_another_mesh(corpus, straight, tmp_path, first, second):
    """Stopped by SIGTERM after a few steps on one mesh, continued on another: the same run."""
    said = run(corpus, tmp_path, first[1], first[0], stop=3)
    stopped = re.search(r"stopped by SIGTERM after (step [3-7]) of 8: saved", said)[1]
    said = run(corpus, tmp_path, second[1], second[0])
    assert f"after {stopped}\n" in said
    assert losses(tmp_path) == pytest.approx(losses(straight[0]), abs=2e-5)
    assert held_out(tmp_path) == pytest.approx(held_out(straight[0]), abs=2e-5)
    after = [text.partition("----")[2] for text in (said, straight[1])]
    samples = [text.partition("read weights")[0] for text in after]
    assert samples[0] == samples[1] != ""


DIES_IN_EVALUATION = """
import os, sys
sys.path.insert(0, {directory!r})
import train
train.evaluate = lambda *args: os._exit(9)
train.main()
"""


@pytest.mark.slow
def test_a_crash_in_an_evaluation_loses_no_step(corpus, straight, tmp_path):
    """It is saved before, and evaluated when it continues: also if the scheduler did not wait."""
    script, folder = tmp_path / "dies.py", tmp_path / "run"
    script.write_text(DIES_IN_EVALUATION.format(directory=str(TRAIN.parent)))
    args = (*TINY, "--data", *corpus, "--output-dir", folder)
    assert pool.run(script, *args).returncode == 9
    assert [save.name for save in (folder / "checkpoints").iterdir()] == ["step_00000004"]
    assert not held_out(folder)
    for _ in range(2):  # the second start finds all steps done
        pool.run(TRAIN, *args).check()
        assert losses(folder) == losses(straight[0])
        assert held_out(folder) == held_out(straight[0])


@pytest.fixture(scope="module")
def straight_tied(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    run(corpus, folder, "--tied --layers 4", ranks=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "--pp 2"), (1, "")),
        ((1, ""), (4, "--pp 2 --tp 2 --sequence-parallel")),
        ((2, "--pp 2 --schedule interleaved"), (2, "--pp 2 --schedule zero-bubble --accumulate 4")),
    ],
)
def test_a_tied_run_moves_into_and_out_of_a_pipeline(
    corpus, straight_tied, tmp_path, first, second
):
    """Both stages have a copy of the embedding; the checkpoint and the export have it once."""
    run(corpus, tmp_path / "run", f"{first[1]} --tied --layers 4", first[0], stop=3)
    said = run(corpus, tmp_path / "run", f"{second[1]} --tied --layers 4", second[0])
    assert "continuing from" in said
    assert losses(tmp_path / "run") == pytest.approx(losses(straight_tied), abs=2e-5)
    assert held_out(tmp_path / "run") == pytest.approx(held_out(straight_tied), abs=2e-5)
    save = tmp_path / "run/checkpoints/step_00000008"
    entries = FileSystemReader(save).read_metadata().state_dict_metadata
    ends = {name for name in entries if "head" in name or "token_embedding" in name}
    of_optimizer = {
        f"optimizer.token_embedding.weight.{k}" for k in ("step", "exp_avg", "exp_avg_sq")
    }
    assert ends == {"model.token_embedding.weight"} | of_optimizer
    # As many parameters as one process says.
    numbers = 256 * 16 + 16 * 16 + 4 * (12 * 16**2 + 12 * 16) + 2 * 16
    assert re.search(r"([\d,]+) parameters", said)[1].replace(",", "") == str(numbers)
    exported = pool.run(FOLDER / "export.py", tmp_path / "run", tmp_path / "exported").check()
    assert float(re.search(r"differ by (\S+) at most", exported.output)[1]) < 1e-5


@pytest.mark.slow
def test_copies_of_a_tied_weight_that_drift_apart_are_seen(tmp_path):
    script = ROOT / "tests/workers/gpt_drifting.py"
    result = pool.run(script, ranks=2)
    assert result.returncode == 2
    assert "step 2: ranks 0 and 1 hold different numbers, first in token_embedding" in (
        result.output
    )


@pytest.mark.slow
def test_a_kill_during_an_asynchronous_save_leaves_the_save_before(corpus, tmp_path):
    script = ROOT / "tests/workers/gpt_async_save.py"
    args = (*TINY, "--steps", 12, "--log-every", 4, "--data", *corpus)
    common = (*args, "--dp-shard", 2, "--async-save", "--output-dir", tmp_path / "killed")
    killed = pool.run(script, "kill", *common, ranks=2)
    assert killed.returncode != 0
    assert "killed in step 11" in killed.output  # the save after step 8 was being written
    assert [s.name for s in (tmp_path / "killed/checkpoints").glob("step*")] == ["step_00000004"]
    said = pool.run(TRAIN, *common, ranks=2).check().output
    assert "step_00000004 after step 4\n" in said
    pool.run(TRAIN, *args, "--dp-shard", 2, "--output-dir", tmp_path / "whole", ranks=2).check()
    states = [saved_parameters(tmp_path / name) for name in ("whole", "killed")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_an_asynchronous_save_counts_although_the_next_loss_is_nan(corpus, tmp_path):
    args = (*TINY, "--lr", 1e38, "--warmup", 0, "--checkpoint-every", 1, "--log-every", 1)
    result = pool.run(TRAIN, *args, "--async-save", "--data", *corpus, "--output-dir", tmp_path)
    assert "step 2: the loss is nan" in result.output
    assert [save.name for save in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.slow
def test_a_stop_waits_for_an_asynchronous_save(corpus, tmp_path):
    script = ROOT / "tests/workers/gpt_async_save.py"
    args = (*TINY, "--steps", 4000, "--checkpoint-every", 4000, "--data", *corpus)
    common = (*args, "--async-save", "--output-dir", tmp_path)
    said = pool.run(script, "stop", *common, ranks=2).check().output
    stopped = int(re.search(r"stopped by SIGTERM after step (\d+) of 4000: saved", said)[1])
    assert said.rindex(f"written after {stopped} steps") < said.index("stopped by SIGTERM")
    names = {save.name for save in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{stopped:08}"}


@pytest.mark.slow
def test_resumed_run_equals_the_straight_one(corpus, tmp_path):
    """On one mesh, bit for bit: a Llama with one head of keys and values on two ranks."""
    flags, states = "--tp 2 --clip 0.2 --architecture llama --kv-heads 1 --qk-norm", []
    shape = {"architecture": "llama", "kv_heads": 1, "qk_norm": True}
    for name, stops in (("straight", [0]), ("stopped", [3, 0])):
        for stop in stops:
            run(corpus, tmp_path / name, flags, ranks=2, stop=stop)
        states.append(saved_parameters(tmp_path / name, **shape))
    assert losses(tmp_path / "straight") == losses(tmp_path / "stopped")
    assert len(losses(tmp_path / "straight")) == 8
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_speed_is_of_training_alone(corpus, tmp_path):
    """By a clock on which a step takes 1 s, an evaluation and a save 100 s each."""
    script = ROOT / "tests/workers/gpt_clock.py"
    flags = ("--log-every", 3, "--eval-every", 2, "--checkpoint-every", 4, "--gc-every", 3)
    args = (*TINY, *flags, "--output-dir", tmp_path, "--data", *corpus)
    output = pool.run(script, *args, ranks=2).check().output
    measured = [line for line in read_metrics(tmp_path) if "tokens_per_second" in line]
    assert [line["step"] for line in measured] == [2, 3, 4, 6, 8]
    assert [line["tokens_per_second"] for line in measured] == [8 * 16] * 5
    # The share of what two ranks could do, each of which has a peak of 1 GFLOP/s.
    config = GPTConfig(vocab_size=256, block_size=16, layers=2, heads=2, dim=16)
    share = 8 * 16 * config.flops_per_token(16) / 2e9
    assert [line["mfu"] for line in measured] == pytest.approx([share] * 5)
    assert [line["step"] for line in read_metrics(tmp_path) if "validation_loss" in line] == [
        2, 4, 6, 8,
    ]  # fmt: skip
    # Eight steps of 1 s, four evaluations and two saves of 100 s each, on two ranks.
    (summary,) = (line for line in read_metrics(tmp_path) if "hours" in line)
    assert (summary["step"], summary["tokens"]) == (8, 8 * 8 * 16)
    assert summary["hours"] * 3600 == pytest.approx(608)
    assert summary["rank_hours"] * 3600 == pytest.approx(2 * 608)
    assert output.count("garbage collected after steps: 3 6 automatic: False\n") == 2
    # Continued by one rank, it adds to the hours before the last save.
    pool.run(TRAIN, *args, "--steps", 9).check()
    summary = next(line for line in read_metrics(tmp_path) if line.get("tokens") == 9 * 8 * 16)
    # Eight steps, three evaluations and a save: the last save comes before its evaluation.
    assert 2 * 408 < summary["rank_hours"] * 3600 < 2 * 408 + 100
    assert "matrix products: high" in output
    # Four times two batches of eight, of which each rank has a half.
    assert output.count(f"held-out windows of this rank: {4 * 2 * 8 // 2}\n") == 2
    settings = Settings(steps=8)
    rates = [f"{settings.lr * schedule(step, settings):.4g}" for step in range(8)]
    # They reach the optimizer, both of its groups.
    assert f"rates: {' '.join(f'{rate}/{rate}' for rate in rates)}\n" in output


@pytest.mark.slow
def test_a_run_is_its_text_and_can_be_made_longer(corpus, straight, tmp_path):
    folder = tmp_path / "run"
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 500)
    moved = [tmp_path / file.name for file in corpus]
    for old, new in zip(corpus, moved, strict=True):
        new.write_bytes(old.read_bytes())
    common = (*TINY, "--output-dir", folder)
    pool.run(TRAIN, *common, "--steps", 4, "--data", *corpus).check()
    refused = pool.run(TRAIN, *common, "--data", other)
    assert refused.returncode == 2
    assert "was trained with data = " in refused.output
    refused = pool.run(TRAIN, *common, "--data", *corpus, "--pad-vocab-to", 400)
    assert refused.returncode == 2
    assert "has 256 rows, not --pad-vocab-to 400" in refused.output
    # The same text, wherever it lies, and more steps of it.
    said = pool.run(TRAIN, *common, "--data", *moved).check().output
    assert "planned for 4 steps, now for 8: from here on the learning rate follows" in said
    assert [line["step"] for line in read_metrics(folder) if "loss" in line] == [*range(1, 9)]
    rates = [[m["lr"] for m in read_metrics(run) if "lr" in m] for run in (folder, straight[0])]
    assert rates[0][4:] == rates[1][4:]
    assert rates[0][:4] != rates[1][:4]


@pytest.mark.slow
def test_loss_that_is_no_number_stops_the_run(corpus, tmp_path):
    args = (*TINY, "--lr", 1e30, "--clip", 0, "--output-dir", tmp_path, "--data", *corpus)
    result = pool.run(TRAIN, *args)
    assert result.returncode == 2
    assert re.search(r"error: step [2-4]: the loss is .*: try a smaller --lr", result.output)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def saved_parameters(folder, **shape) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    model = GPT(GPTConfig(256, 16, 2, 2, 16, **shape))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoints/step_00000008", no_dist=True)
    return state["model"]


@pytest.mark.slow
def test_export_generate_and_start_again(corpus, straight, tmp_path):
    """The saved run, in transformers and in one process and on two meshes: the same greedy text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = straight
    exported = tmp_path / "exported"
    said = pool.run(FOLDER / "export.py", folder, exported).check().output
    assert float(re.search(r"differ by (\S+) at most", said)[1]) < 1e-5
    # Another run starts from it: with the loss with which this one ended.
    flags = ("--init-from", exported, "--tp", 2, "--steps", 1, "--lr", 1e-9)
    args = (*TINY, *flags, "--output-dir", tmp_path / "again", "--data", *corpus)
    pool.run(TRAIN, *args, ranks=2).check()
    assert held_out(tmp_path / "again") == pytest.approx(held_out(folder)[-1:], abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    inputs = tokenizer("def \u00e4", return_tensors="pt")
    assert inputs.input_ids[0].tolist() == list("def \u00e4".encode())
    tokens = model.generate(**inputs, max_new_tokens=9, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(tokens[0])
    options = (folder, "--prompt", "def \u00e4", "--tokens", 9, "--temperature", 0)
    for mesh, ranks in (("", 1), ("--tp 2", 2), ("--pp 2", 2)):
        result = pool.run(FOLDER / "generate.py", *options, *mesh.split(), ranks=ranks).check()
        assert result.output.rstrip("\n").endswith(expected), (mesh, result.output)
    again = pool.run(FOLDER / "export.py", folder, exported)
    assert again.returncode == 2
    assert "is not empty" in again.output


def test_a_window_is_filled_up_to_a_multiple_and_the_tokens_stay_the_same():
    """For sequence parallelism, which cuts it; what is behind the end changes nothing."""
    model = initialize(GPT(GPTConfig(256, 8, 2, 2, 16)), seed=0)
    prompt, read = torch.tensor([[5, 6, 7], [8, 9, 10]]), []
    model.register_forward_pre_hook(lambda model, inputs: read.append(inputs[0]))
    plain = generate(model, None, prompt, count=9)
    windows = [plain[:, max(0, end - 8) : end] for end in range(3, 12)]  # the newest 8 tokens
    assert all(torch.equal(*both) for both in zip(read, windows, strict=True))
    read.clear()
    assert torch.equal(generate(model, None, prompt, count=9, length_multiple=4), plain)
    assert [window.shape[1] for window in read] == [4, 4] + 7 * [8]


def test_weights_that_were_tied_are_one_after_they_were_cut(group):
    model = GPT(GPTConfig(256, 16, 2, 2, 16, tied=True))
    cut = apply_tensor_parallel(model, init_device_mesh("cpu", (1,)))
    assert isinstance(cut.head.weight, DTensor)
    assert cut.head.weight is cut.token_embedding.weight


@pytest.mark.slow
def test_it_learns_more_than_pairs(corpus, tmp_path):
    """A bigram model sees one token; the GPT must do better on the same held-out text."""
    sizes = ("--layers", 2, "--heads", 2, "--dim", 64, "--block-size", 32, "--batch-size", 16)
    steps = ("--steps", 300, "--eval-every", 300, "--eval-batches", 4, "--lr", 5e-3, "--sample", 0)
    args = (*sizes, *steps, "--output-dir", tmp_path, "--data", *corpus)
    said = pool.run(TRAIN, *args).check().output
    bigram = float(re.search(r"a bigram model has a loss of ([\d.]+)", said)[1])
    assert held_out(tmp_path)[-1] < bigram - 0.1


def test_a_gpt2_with_a_head_dim_of_its_own_is_not_exported():
    shape = {"vocab_size": 256, "block_size": 16, "layers": 1, "heads": 2, "dim": 16}
    assert their_config(GPTConfig(**shape), 0).n_head == 2
    with pytest.raises(UserError, match="GPT-2 has no --head-dim"):
        their_config(GPTConfig(**shape, head_dim=16), 0)


@pytest.mark.slow
def test_tokenizer_of_a_directory(corpus, tmp_path):
    """Words of a tokenizer that was trained here: data, sample and export use it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train([str(file) for file in corpus], vocab_size=300, special_tokens=["<pad>", "<end>"])
    own = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
    own.save_pretrained(tmp_path / "tokenizer")
    args = (*TINY, "--prompt", "import ", "--output-dir", tmp_path / "run", "--data", *corpus)
    said = pool.run(TRAIN, *args, "--tokenizer", "tokenizer", cwd=tmp_path).check()
    assert "---- 12 tokens after 'import ':\nimport " in said.output
    exported = pool.run(FOLDER / "export.py", tmp_path / "run", tmp_path / "exported")
    assert exported.check()
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["eos_token_id"] == own.eos_token_id == 1
    again = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "def f(x):\n    return x"
    assert again(text)["input_ids"] == own(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    for script in ("export.py", "generate.py"):
        folders = (tmp_path / "run", tmp_path / "other")[: 2 if script == "export.py" else 1]
        lost = pool.run(FOLDER / script, *folders)
        assert lost.returncode == 2
        assert f"cannot load --tokenizer {tmp_path}/tokenizer: " in lost.output
    more = pool.run(TRAIN, *args, "--tokenizer", tmp_path / "moved", "--steps", 9).check()
    assert "after step 8\n" in more.output
    pool.run(FOLDER / "export.py", tmp_path / "run", tmp_path / "other").check()


@pytest.mark.slow
def test_broken_checkpoints(straight, tmp_path):
    missing = pool.run(FOLDER / "generate.py", tmp_path)
    assert missing.returncode == 2
    assert "there is no checkpoint in" in missing.output
    shutil.copytree(straight[0], tmp_path / "broken")
    older, newer = sorted((tmp_path / "broken").rglob("*.distcp"))  # of steps 4 and 8
    flip_a_bit(newer)
    flipped = pool.run(FOLDER / "generate.py", tmp_path / "broken", "--tokens", 1).check()
    assert "is broken" in flipped.output
    flip_a_bit(older)
    flipped = pool.run(FOLDER / "generate.py", tmp_path / "broken")
    assert flipped.returncode == 2
    assert "is broken" in flipped.output


# generate.py. Rank 1 does not see the newest save yet. Prints how many files the rank checks.
LATE = """
import os, sys
sys.path.insert(0, {directory!r})
import checkpoint, generate, saves
checked, checksum, all_saves = [], saves.checksum, saves.saves
saves.checksum = lambda file: checked.append(file) or checksum(file)
if os.environ["RANK"] == "1":
    saves.saves = checkpoint.saves = lambda folder: all_saves(folder)[:-1]
generate.main()
print("checked", len(checked))
"""


@pytest.mark.slow
def test_ranks_that_generate_read_one_save_and_each_file_once(straight, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE.format(directory=str(FOLDER)))
    args = (straight[0], "--tokens", 9)
    alone = pool.run(FOLDER / "generate.py", *args).check().output
    said = pool.run(script, *args, "--tp", 2, ranks=2).check().output
    checked = [int(line.split()[1]) for line in said.splitlines() if line.startswith("checked")]
    files = [path for path in (straight[0] / "checkpoints/step_00000008").iterdir()]
    assert sum(checked) == len(files) - 1  # run.pt holds the sums, and has one of its own
    assert text_of(said) == text_of(alone)


def text_of(output: str) -> str:
    lines = output.splitlines()
    return "\n".join(x for x in lines if "rank(s) on" not in x and not x.startswith("checked"))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_script(corpus, tmp_path):
    flags = ("--profile", "--steps", 14, "--tensorboard", "--output-dir", tmp_path)
    flags += ("--timeout", 120, "--keep", 1)
    result = pool.run(TRAIN, *TINY, *flags, "--data", *corpus, timeout=240, ranks=2).check()
    assert "pp 1   dp_replicate 2   dp_shard 1   cp 1   tp 1" in result.output
    assert re.search(
        r"\na bigram model has a loss of [\d.]+ on the held-out windows\n", result.output
    )
    assert "---- 12 tokens after 'import os\\n\\n\\ndef ':\nimport os\n\n\ndef " in result.output
    for word in ("Warning", "Traceback", "redistribut"):
        assert word not in result.output
    for rank in (0, 1):
        events = json.loads((tmp_path / f"trace_{rank}.json").read_text())["traceEvents"]
        assert any("all_reduce" in str(event.get("name")) for event in events)
    measured = [m for m in read_metrics(tmp_path) if "mfu" in m]
    assert all(m["tokens_per_second"] > 0 and 0 < m["mfu"] < 1 for m in measured)
    assert list((tmp_path / "tensorboard").iterdir())
    # Off a terminal, too, a line tells how it goes.
    number = r"[\d.e+-]+"
    assert re.search(
        rf"^step +7/14   epoch 0   loss {number}   lr {number}   grad norm {number}   "
        rf"tokens/s [\d.,]+   mfu {number}   memory MB [\d.,]+$",
        result.output,
        re.M,
    )
    (only,) = (tmp_path / "checkpoints").iterdir()
    assert only.name == "step_00000014"


@pytest.mark.slow
def test_fsdp_gathers_the_next_unit_while_one_computes_and_no_more(matrix):
    seen = matrix[2]["gathered"]
    assert len(seen["units"]) == 6
    here, following = seen["units"], [*seen["units"][1:], 0]
    assert seen["found"] == [a + b for a, b in zip(here, following, strict=True)]


@pytest.mark.slow
def test_tp_fsdp_counts_what_the_formula_says():
    output = pool.run(FOLDER / "tp_fsdp.py", ranks=4, timeout=240).check().output
    rows = re.findall(r"^(\d) x (\d) +([\d, ]+)$", output, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [("4", "1"), ("2", "2"), ("1", "4")]
    for shards, tp, numbers in rows:
        held, gathered, dp_calls, dp, dp_formula, tp_calls, sent, formula = (
            int(n.replace(",", "")) for n in numbers.split()
        )
        assert dp == dp_formula
        assert sent == formula
        assert (dp_calls > 0, tp_calls > 0) == (shards != "1", tp != "1")
        assert 1881088 / 4 <= held < 1.1 * 1881088 / 4
        assert gathered < 1.1 * 1881088 / int(tp)
    assert_differences(output, rows=3)
    assert "redistribut" not in output  # torch's advice about DTensors, once a rank


@pytest.mark.slow
def test_three_dimensions():
    output = pool.run(FOLDER / "three_dimensions.py", ranks=8, timeout=280).check().output
    assert_differences(output, rows=1)
    places = re.findall(r"^ +(\d) +(\d) +(\d) +(\d)   (\S.*?)  ", output, flags=re.MULTILINE)
    assert [tuple(map(int, place[1:4])) for place in places] == [
        (pp, dp, tp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)
    ]
    assert [place[4] for place in places[::4]] == ["embeddings, block 0", "block 1, norm, head"]
    # Two micro-batches of two sequences of 64 tokens, each 128 numbers of 4 bytes.
    assert re.search(r"^pp +group of 2 +2 +131,072 ", output, flags=re.MULTILINE)


def assert_differences(output: str, rows: int) -> None:
    """The table of differences: loss, norm, gradient, parameter (AdamW with a rate of 1e-3)."""
    table = output.partition("largest difference of")[2].splitlines()[1:]
    assert len(table) == rows
    for line in table:
        loss, norm, gradient, parameter = map(float, line.split()[-4:])
        assert max(loss, norm, gradient) < 1e-5
        assert parameter < 5e-4


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("size", benchmark.SIZES)
def test_the_benchmark_can_train_every_size_on_its_usual_meshes(size, ranks):
    usual = {"size": size, "batch_size": None, "clip": 1.0, "precision": "fp32", "compile": False}
    usual |= {"activation_checkpointing": None, "keep_gathered": False, "sequence_parallel": False}
    usual |= {"fp8": size == "124M"}
    args, config = SimpleNamespace(**usual), benchmark.config_of(size)
    for mesh in benchmark.usual(ranks, args):
        settings = benchmark.settings_of(mesh, args, ranks)
        assert settings.fp8 == args.fp8
        assert config.vocab_size % settings.tp == 0


@pytest.mark.slow
def test_benchmark():
    script = FOLDER / "benchmark.py"
    args = ("--size", "tiny", "--repeats", 1, "--steps", 1)
    output = pool.run(script, *args, ranks=4, timeout=200).check().output
    rows = re.findall(
        r"^(\S+=4|dp_shard=2 tp=2) .* (\d+)% +(\d+) +([\d.]+) +([\d.]+)$", output, re.M
    )
    assert [row[0] for row in rows] == ["dp_replicate=4", "dp_shard=4", "tp=4", "dp_shard=2 tp=2"]
    parameters = sum(p.numel() for p in GPT(GPTConfig(256, 64, 2, 4, 64)).parameters())
    held = {row[0]: float(row[4]) for row in rows}
    sent = {row[0]: float(row[3]) for row in rows}
    # Parameter, gradient and AdamW's two averages, 4 bytes each.
    assert held["dp_replicate=4"] == pytest.approx(16 * parameters / 1e6, abs=0.01)
    assert held["dp_shard=4"] == pytest.approx(16 * parameters / 4 / 1e6, abs=0.01)
    assert sent["dp_replicate=4"] == pytest.approx(4 * parameters * 2 * 3 / 4 / 1e6, abs=0.02)
    wrong = python(script, "--mesh", "tp=2")
    assert wrong.returncode == 2
    assert "does not multiply to the 1 rank(s)" in wrong.output


# ---- one GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [("", 5e-3), ("--precision bf16", 1e-1), ("--compile", 1e-2), ("--tied", None)],
)
def test_gpu_loss_equals_cpu(corpus, straight, tmp_path, flags, tolerance):
    """From the CPU's checkpoint on: a GPU draws other first values."""
    if tolerance:
        continue_from(straight[0] / "checkpoints/step_00000004", tmp_path / "checkpoints", flags)
    args = (*TINY, "--device", "cuda", "--output-dir", tmp_path, "--data", *corpus)
    result = torchrun(TRAIN, *args, *flags.split(), ranks=1, timeout=280).check()
    assert "1 rank(s) on cuda, cpu:gloo,cuda:nccl" in result.output
    assert np.isfinite(losses(tmp_path)).all()
    if tolerance:
        assert losses(tmp_path) == pytest.approx(losses(straight[0])[4:], abs=tolerance)


LONG = "--architecture llama --dim 64 --kv-heads 1 --window 60 --block-size 128 --lr 0.01"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        "--dropout 0.1",
        "--dropout 0.1 --compile",
        "--architecture llama --kv-heads 1 --qk-norm --window 5 --document-masks",
        f"{LONG} --document-masks",
        f"{LONG} --document-masks --activation-checkpointing",
        f"{LONG} --document-masks --compile",
        "--architecture llama --kv-heads 1 --loss-chunks 4 --activation-checkpointing selective",
    ],
)
def test_gpu_continues_what_the_cpu_began(corpus, tmp_path, flags):
    for device in ("cpu", "cuda"):
        where = ("--device", device, "--output-dir", tmp_path / device)
        args = (*TINY, *where, "--data", *corpus, *flags.split())
        if LONG in flags and device == "cuda":
            args += ("--flex-attention",)
        assert f"rank(s) on {device}" in torchrun(TRAIN, *args, ranks=1, timeout=280).check().output
        if device == "cpu":
            save = "checkpoints/step_00000004"
            shutil.copytree(tmp_path / "cpu" / save, tmp_path / "cuda" / save)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu")[4:], abs=5e-3)


def continue_from(save: Path, folder: Path, flags: str) -> None:
    """A copy of the save in `folder`, as if the run had had its --precision from the beginning."""
    shutil.copytree(save, folder / save.name)
    run = torch.load(folder / save.name / "run.pt", weights_only=True)
    run["run"]["precision"] = "bf16" if "bf16" in flags else "fp32"
    torch.save(run, folder / save.name / "run.pt")
