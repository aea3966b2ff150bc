"""transformer_basics: first values, buffers, weights that others trained, and where a run goes on.

The expected values are written out here; nothing is taken from the code under test but the model.
"""

import math
import platform
import re
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import parallelize
import pool
import pytest
import torch
from arguments import UserError
from config import Settings
from data import Batches, batch_part
from helpers import ROOT, python, read_metrics
from model import GPT, GPTConfig, initialize
from optimizer import make_optimizer
from parallelize import materialize, parameters_without_memory, spread_model
from sampling import choose
from shards import Shard
from step import clip_gradients
from tiles import fill_normal
from torch import nn
from workers.gpt_equivalence import first_values

TRAIN = ROOT / "transformer_basics/train.py"
SIZES = ("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 16, "--batch-size", 8)
STEPS = ("--steps", 4, "--log-every", 1, "--eval-every", 4, "--eval-batches", 2, "--sample", 0)


# ---- first values


def test_first_values_follow_gpt2s_rule():
    config = GPTConfig(vocab_size=256, block_size=64, layers=8, heads=4, dim=64)
    model, by_hand = initialize(GPT(config), seed=5), GPT(config)
    first_values(by_hand, seed=5)
    for (name, ours), theirs in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, msg=name)
    # No two matrices are alike, and their spread is the rule's: 0.02, or 0.02 / sqrt(2 x 8).
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    assert len({p.flatten()[:8].sum().item() for p in matrices.values()}) == len(matrices) == 51
    for name, p in matrices.items():
        expected = 0.005 if name.endswith(("attention.out.weight", "contract.weight")) else 0.02
        assert p.std().item() == pytest.approx(expected, rel=0.05), name
    assert not torch.equal(model.head.weight, initialize(GPT(config), seed=6).head.weight)


def test_a_large_matrix_is_drawn_in_tiles():
    """Each has numbers of its own, and they do not depend on what else a rank draws."""
    config = GPTConfig(vocab_size=1100, block_size=8, layers=1, heads=2, dim=600)
    head = initialize(GPT(config), seed=0).head.weight.detach()
    name = zlib.crc32(b"0 head.weight")
    for row, column in ((0, 0), (512, 0), (1024, 0), (512, 512)):
        tile = head[row : row + 512, column : column + 512]
        own = torch.Generator().manual_seed(name + row * 600 + column)
        torch.testing.assert_close(tile, 0.02 * torch.randn(tile.shape, generator=own))
    assert head.std().item() == pytest.approx(0.02, rel=0.01)
    pair = torch.stack([head[:512].flatten(), head[512:1024].flatten()])
    assert abs(torch.corrcoef(pair)[0, 1]) < 0.01


# ---- what no state dict holds


class RotatingNorm(nn.LayerNorm):
    """As a model of one's own may have it: a table that is computed, and not saved."""

    def __init__(self, dim: int):
        super().__init__(dim)
        frequencies = 1 / 100 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x):
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        return super().forward(x) * self.scale * torch.cat([angles.cos(), angles.sin()], dim=1)


class RotaryGPT(GPT):
    def __init__(self, config, layers=None, dropout=0.0):
        super().__init__(config, layers, dropout)
        for block in self.blocks.values():
            block.attention_norm = RotatingNorm(config.dim)


@pytest.mark.parametrize("resumed", [False, True])
def test_buffers_have_the_values_of_an_ordinary_model(group, monkeypatch, tmp_path, resumed):
    from checkpoint import load_model, save_checkpoint
    from runtime import Worker

    monkeypatch.setattr(parallelize, "GPT", RotaryGPT)
    worker = Worker(0, 0, 1, torch.device("cpu"))
    settings = Settings(layers=2, heads=2, dim=16, block_size=16, batch_size=4).on(1)
    ordinary = RotaryGPT(settings.model(64))
    first_values(ordinary)
    _, model, _ = spread_model(ordinary.config, settings, worker.device)
    initialize(model, seed=0)
    if resumed:
        for buffer in (*model.buffers(), *ordinary.buffers()):
            buffer.mul_(2)  # as if training had changed them
        parts = {"model": model, "optimizer": make_optimizer(model, settings)}
        save_checkpoint(tmp_path, parts, 1, {}, worker)

        def make(run):
            return spread_model(ordinary.config, settings, worker.device)[1]

        model, _ = load_model(tmp_path, make, worker)
    expected = dict(ordinary.named_buffers())
    assert len(expected) == 4
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    tokens = torch.arange(32).view(2, 16)
    torch.testing.assert_close(model(tokens), ordinary(tokens))


def test_a_buffer_of_several_modules_has_its_values():
    """Such as one rotary table in all blocks."""

    def two_layers():
        table = torch.arange(6.0)
        layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        for layer in layers:
            layer.register_buffer("table", table, persistent=False)
        return layers

    with parameters_without_memory():
        model = two_layers()
    model.tie = lambda: None
    materialize(model, torch.device("cpu"))
    for layer in model:
        assert layer.table.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_a_parameter_that_is_no_matrix_is_named(shape):
    with pytest.raises(
        UserError, match=rf"give the parameter of shape {re.escape(str(shape))} its"
    ):
        fill_normal(torch.empty(shape), 0.02, 0)


def test_a_buffer_that_nothing_fills_is_named():
    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("twice", 2 * self.layer.weight.detach())

    with parameters_without_memory():
        model = Derived()
    assert model.layer.weight.is_meta
    with pytest.raises(UserError, match="the buffer twice has no values, and nothing fills it"):
        materialize(model, torch.device("cpu"))
    assert not Derived().layer.weight.is_meta  # outside all is as it was


# ---- the optimizer, by hand


def test_adamw_is_gpt3s(group):
    """Matrices decay, norms and biases do not; betas 0.9 and 0.95."""
    settings = Settings(layers=1, heads=2, dim=16, block_size=8, batch_size=1, lr=0.01).on(1)
    _, model, _ = spread_model(settings.model(64), settings, torch.device("cpu"))
    initialize(model, seed=0)
    optimizer = make_optimizer(model, settings)
    expected = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.arange(8)[None] * step).square().sum().backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            g, is_matrix = gradients[name], name.endswith("weight") and "norm" not in name
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            if is_matrix:
                expected[name] *= 1 - 0.01 * 0.1
            root = (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            expected[name] -= 0.01 * first[name] / (1 - 0.9**step) / root
            torch.testing.assert_close(
                p.full_tensor(), expected[name], rtol=0, atol=1e-6, msg=f"{name} in step {step}"
            )


def test_clipping_by_hand(group):
    settings = Settings(layers=1, heads=2, dim=16, block_size=8, batch_size=1).on(1)
    mesh, model, _ = spread_model(settings.model(64), settings, torch.device("cpu"))
    initialize(model, seed=0)
    model(torch.arange(8)[None]).square().sum().backward()
    before = [p.grad.full_tensor().clone() for p in model.parameters()]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in before))
    assert clip_gradients(model, 10 * norm, mesh).item() == pytest.approx(norm, rel=1e-5)
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad.full_tensor(), g)  # shorter than the limit: as it was
    clip_gradients(model, 0.5 * norm, mesh)
    for p, g in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), 0.5 * g, rtol=1e-4, atol=1e-9)


# ---- the text


@pytest.fixture(scope="module")
def two_languages(tmp_path_factory) -> Path:
    """One document; what is held out, its last twentieth, is unlike the rest."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(b"abcdefghi\n" * 950 + b"98 76 54\n" * 60)
    return file


@pytest.mark.slow
def test_the_validation_loss_is_that_of_held_out_text(two_languages, tmp_path):
    args = (*SIZES, *STEPS, "--lr", 0.01, "--output-dir", tmp_path, "--data", two_languages)
    said = pool.run(TRAIN, *args).check().output
    (logged,) = [line for line in read_metrics(tmp_path) if "validation_loss" in line]
    # By hand: lines of the last twentieth and the byte that ends a document, in windows of 16.
    text = two_languages.read_bytes()
    held_out = text[text.rfind(b"\n", 0, len(text) * 19 // 20) + 1 :] + b"\0"
    assert b"a" not in held_out
    available = (len(held_out) - 1) // 16
    count = min(2, available // 8) * 8
    starts = [i * available // count * 16 for i in range(count)]
    rows = torch.tensor([list(held_out[start : start + 17]) for start in starts])
    log_probabilities = saved_model(tmp_path, 4)(rows[:, :-1]).log_softmax(-1)
    expected = -log_probabilities.gather(-1, rows[:, 1:, None]).mean().item()
    assert logged["validation_loss"] == pytest.approx(expected, abs=1e-5)
    trained = [line["loss"] for line in read_metrics(tmp_path) if "loss" in line]
    assert trained[-1] < expected - 0.1  # it was trained on the other text
    # The bigram model: pairs of the training text, one added to each of 256 x 256.
    counts = np.ones((256, 256))
    training = text[: len(text) - len(held_out) + 1] + b"\0"
    np.add.at(counts, (list(training[:-1]), list(training[1:])), 1)
    probability = counts / counts.sum(1, keepdims=True)
    bigram = -np.log(probability[rows[:, :-1].numpy(), rows[:, 1:].numpy()]).mean()
    assert f"a bigram model has a loss of {bigram:.3f} on the held-out windows" in said


def saved_model(folder: Path, step: int) -> GPT:
    import torch.distributed.checkpoint as dcp

    model = GPT(GPTConfig(256, 16, 2, 2, 16))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / f"checkpoints/step_{step:08}", no_dist=True)
    model.load_state_dict(state["model"])
    return model


# ---- resume first


@pytest.mark.slow
def test_a_run_that_goes_on_draws_and_reads_no_first_values(two_languages, tmp_path):
    """Not the weights it began with either: their folder may be gone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = tmp_path / "theirs"
    GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).save_pretrained(theirs)
    args = (*SIZES, *STEPS, "--init-from", theirs, "--data", two_languages)
    args = (*args, "--output-dir", tmp_path / "run")
    script = ROOT / "tests/workers/gpt_resume.py"
    first = pool.run(script, 0, *args).check().output
    assert "read weights: 1, drew first values: 0" in first
    shutil.rmtree(theirs)
    longer = pool.run(script, 0, *args, "--steps", 6).check().output
    assert "read weights: 0, drew first values: 0" in longer
    assert "planned for 4 steps, now for 6" in longer
    steps = [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    shorter = pool.run(script, 0, *args)
    assert shorter.returncode == 2
    assert (
        "checkpoints is at step 6, beyond --steps 4: choose more steps, or another"
        in shorter.output
    )


# ---- random numbers


@pytest.mark.slow
def test_dropout_differs_where_the_data_do_and_goes_on_after_a_stop(two_languages, tmp_path):
    """On dp 2 x tp 2: ranks of one tp group drop the same. Resumed, it is as if never stopped."""
    script = ROOT / "tests/workers/gpt_dropout.py"
    args = (*SIZES, "--steps", 6, "--log-every", 1, "--eval-every", 3, "--eval-batches", 1)
    args = (*args, "--sample", 0, "--tp", 2, "--data", two_languages)
    for stop, folder in ((0, "straight"), (3, "stopped"), (0, "stopped")):
        run = (stop, tmp_path / folder, *args, "--output-dir", tmp_path / folder)
        pool.run(script, *run, ranks=4).check()
    masks = [torch.load(tmp_path / f"straight/masks_{rank}") for rank in range(4)]
    assert masks[0].keys() == {"first step", "evaluation"}
    first = [m["first step"] for m in masks]
    assert 0.3 < first[0].float().mean() < 0.7
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    assert not any(m["evaluation"].any() for m in masks)  # nothing is dropped there
    runs = [saved_model(tmp_path / name, 6).state_dict() for name in ("straight", "stopped")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.slow
def test_dropout_follows_the_mesh_on_which_a_run_goes_on(two_languages, tmp_path):
    """As many ranks, but tp groups now: the saved generators of four replicas are not for them."""
    script = ROOT / "tests/workers/gpt_dropout.py"
    args = (*SIZES, "--steps", 4, "--log-every", 1, "--eval-every", 4, "--eval-batches", 1)
    args = (*args, "--sample", 0, "--data", two_languages, "--output-dir", tmp_path)
    pool.run(script, 2, tmp_path, *args, ranks=4).check()
    pool.run(script, 0, tmp_path, *args, "--tp", 2, ranks=4).check()
    first = [torch.load(tmp_path / f"masks_{rank}")["first step"] for rank in range(4)]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])


@pytest.mark.slow
def test_the_others_wait_for_a_text_that_takes_longer_than_the_timeout(tmp_path):
    """Both for its tokens and for the counts of its pairs; and they hear what is being done."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"text of its own\n" * 2000)
    script, timeout = ROOT / "tests/workers/gpt_slow_text.py", 10
    args = (*SIZES, *STEPS, "--timeout", timeout, "--data", text)
    said = pool.run(script, timeout + 3, *args, ranks=2).check().output
    assert re.search(r"^tokenising: [\d.]+ of [\d.]+ MB$", said, re.M)
    assert "rank 0 is counting pairs of tokens, for the loss of a bigram model ..." in said
    assert "step 4/4" in said


@pytest.mark.slow
def test_a_rank_that_hangs_later_is_missed_sooner(tmp_path):
    """--timeout would be ten minutes; pool.run ends what computes nothing for five."""
    script = ROOT / "tests/workers/gpt_hang.py"
    flags = ("--steps", 5, "--sample", 0, "--layers", 1, "--dim", 16, "--train-timeout", 4)
    result = pool.run(script, *flags, ranks=2, cwd=tmp_path)
    assert result.returncode not in (0, None)
    assert "4000ms" in result.output


@pytest.mark.slow
def test_what_cannot_be_tokenised_is_an_error_on_every_rank(tmp_path):
    """A full disk, for example: no rank waits for tokens that never come."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"another text\n" * 500)
    script = ROOT / "tests/workers/gpt_slow_text.py"
    result = pool.run(script, "full", *SIZES, *STEPS, "--data", text, ranks=2, timeout=60)
    assert result.returncode == 2
    assert "error: [Errno 28] No space left on device" in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_another_text_on_one_host_is_named(tmp_path):
    """Of one length: the order of the windows is the same on both hosts, their content is not."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for folder, text in zip(hosts, (b"one text\n", b"two text\n"), strict=True):
        folder.mkdir()
        (folder / "text.txt").write_bytes(text * 500)
    args = (*SIZES, *STEPS, "--data", "text.txt")
    result = pool.run(TRAIN, *args, ranks=2, nodes=2, cwd=hosts, timeout=60)
    assert result.returncode == 2
    host = platform.node()
    sentence = f"error: rank 1 on {host} has another text than rank 0 on {host}: copy the same"
    assert sentence in result.output
    assert "step 1" not in result.output


@pytest.mark.slow
def test_an_output_folder_that_hosts_do_not_share_is_named(tmp_path):
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for folder in hosts:
        folder.mkdir()
        (folder / "text.txt").write_bytes(b"one text\n" * 500)
    args = (*SIZES, *STEPS, "--data", "text.txt", "--output-dir", "run")
    result = pool.run(TRAIN, *args, ranks=2, nodes=2, cwd=hosts, timeout=60)
    assert result.returncode == 2
    assert "error: run/checkpoints is not on a disk that all ranks share: rank 1" in result.output
    assert "step 1" not in result.output


# ---- the end


@pytest.mark.slow
def test_nothing_holds_the_group_that_a_process_leaves(tmp_path):
    """In a new process: one that is forked from a warm one has imported all before it joins."""
    script = tmp_path / "job.py"
    script.write_text(
        "from runtime import distributed_worker\n"
        "with distributed_worker('cpu'):\n"
        "    import torch.distributed.nn.functional  # as DistributedDataParallel does\n"
    )
    found = {"PYTHONPATH": str(ROOT / "transformer_basics")}
    said = python(script, cold=True, **found).check().output
    assert "warning" not in said


# ---- windows and their parts


def test_each_window_has_the_token_after_its_last():
    """Of 1,000 tokens the last ten are no window: the target of the last one is missing."""
    shard = Shard(np.arange(1000, dtype=np.uint16), np.zeros(1, np.int64))
    batches = Batches([shard], 10, 99, seed=0)
    assert (batches.windows.count, batches.per_epoch) == (99, 1)
    x, y = batches.get(0, 0, 1)
    assert sorted(x[:, 0].tolist()) == list(range(0, 990, 10))
    assert torch.equal(y, x + 1)


def test_each_data_parallel_rank_has_a_part_of_its_own():
    """On 3 copies of 2 shards: another number of copies than of shards."""

    def axis(rank: int, size: int):
        return SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size)

    coordinates = [(copy, shard) for copy in range(3) for shard in range(2)]
    meshes = [{"dp_replicate": axis(copy, 3), "dp_shard": axis(s, 2)} for copy, s in coordinates]
    assert sorted(batch_part(mesh) for mesh in meshes) == [(part, 6) for part in range(6)]


# ---- sampling


def test_top_k_draws_from_k_and_temperature_sharpens():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).log_softmax(1).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int) -> torch.Tensor:
        drawn = choose(logits, temperature, top_k, generator)
        return drawn.flatten().bincount(minlength=5) / len(logits)

    for temperature in (1.0, 0.5, 2.0):
        for top_k in (0, 2, 3):
            weights = [math.exp((4 - i) / temperature) for i in range(top_k or 5)]
            expected = torch.tensor(weights + [0.0] * (5 - len(weights))) / sum(weights)
            found = shares(temperature, top_k)
            torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
            assert (found[top_k or 5 :] == 0).all()
    assert (choose(logits, 0, 0, generator) == 0).all()
