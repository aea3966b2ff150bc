"""transformer_basics/lora.py: adapters next to frozen weights, on every mesh, and merged."""

import re
from pathlib import Path

import pool
import pytest
import torch
from config import Settings
from helpers import ROOT, python, read_metrics
from lora import add_adapters, flops_per_token, initialize_adapters
from model import GPT, GPTConfig
from on_demand import OnDemand
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from workers import gpt_lora
from workers.gpt_equivalence import LR, STEPS, VOCABULARY
from workers.gpt_lora import (
    CASES,
    GROUPS,
    IN_FLOAT64,
    KINDS,
    RANK_1,
    in_float64,
    one_process,
    settings_with,
)

WORKER = ROOT / "tests/workers/gpt_lora.py"


@pytest.fixture(scope="module")
def reference():
    return OnDemand(one_process)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    def run(group: str) -> dict:
        file = tmp_path_factory.mktemp("lora") / "found"
        pool.run(WORKER, file, group, ranks=GROUPS[group][0]).check()
        return torch.load(file, map_location="cpu")

    return OnDemand(run)


def marked(group: str, *values):
    marks = [pytest.mark.device, pytest.mark.gpu_per_rank(GROUPS[group][0])]
    if group != "quick":
        marks.append(pytest.mark.release if group in ("compiled", "four") else pytest.mark.slow)
    return pytest.param(group, *values, marks=marks)


each_group = pytest.mark.parametrize("group", [marked(group) for group in GROUPS])


def equals_one_process(found: dict, expected: dict, kind: str) -> None:
    """Rounding is below 1e-6 for numbers of order one; times 5 for other machines.

    AdamW divides by the root of small squares, which magnifies it: a hundredth of a step of its lr.
    """
    later = 1e-2 * LR if KINDS[kind][1] == "adamw" else 5e-6
    for part in ("loss", "norm"):
        assert len(found[part]) == STEPS
        assert found[part][0] == pytest.approx(expected[part][0], abs=5e-6)
        assert found[part] == pytest.approx(expected[part], abs=later)
    pairs = zip(found["gradients"], expected["gradients"], (5e-6, later), strict=True)
    pairs = [*pairs, (found["parameters"], expected["parameters"], later)]
    for actual, wanted, tolerance in pairs:
        assert actual.keys() == wanted.keys()
        assert len(actual) == 2 * {"gpt2": 12, "deep": 24}.get(kind, 14)
        for name, tensor in wanted.items():
            assert tensor.abs().max() > 1e-4  # far above the rounding
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("group", "mesh", "kind"), [marked(*case) for case in CASES])
def test_adapters_on_a_mesh_equal_one_process(matrix, reference, group, mesh, kind):
    equals_one_process(matrix[group][mesh, kind], reference[kind], kind)


@pytest.mark.slow
def test_rank_1_equals_one_process_in_float64(tmp_path):
    """In float32 the loss is off by 1e-5: the next test says why."""
    pool.run(gpt_lora.__file__, tmp_path / "found", "float64", ranks=2).check()
    found = torch.load(tmp_path / "found")
    assert found.keys() == {(mesh, kind) for mesh, kinds in IN_FLOAT64.items() for kind in kinds}
    with in_float64():
        expected = {kind: one_process(kind) for kind in ("rank 1", "rank 1, adamw")}
    for (mesh, kind), actual in found.items():
        for part, wanted in expected[kind].items():
            place = f"{mesh}, {kind}, {part}"
            torch.testing.assert_close(actual[part], wanted, rtol=0, atol=1e-9, msg=place)


def test_a_norm_of_almost_0_magnifies_rounding(monkeypatch):
    """In one process, with SGD: a change of 1e-8, the rounding of float32, grows ten thousandfold.

    These adapters add far more to the residual stream than the embedding (deviation 0.02) holds,
    and a layer of rank 1 adds a multiple of one vector. For some tokens the multiple is almost 0:
    the norm divides by the little that is left. The other cases take one cause away.
    """
    value_of = gpt_lora.value_of

    def change(flags: str) -> float:
        """Of the gradients of the last step, at most, if all adapters change by 1e-8."""
        monkeypatch.setitem(KINDS, "this", (f"{RANK_1} {flags}", "sgd"))
        found = []
        for factor in (1, 1 + 1e-8):
            monkeypatch.setattr(gpt_lora, "value_of", lambda *args, f=factor: f * value_of(*args))
            found.append(one_process("this")["gradients"][-1])
        return max((tensor - found[1][name]).abs().max() for name, tensor in found[0].items())

    with in_float64():
        assert change("") > 1e-4
        assert change("--lora-rank 4 --lora-alpha 8") < 1e-5  # four multiples: hardly all are 0
        assert change("--lora-alpha 0.5") < 1e-7  # adapters add less
        assert change("--norm-eps 0.1") < 1e-7  # the norm divides by more


@each_group
def test_only_adapters_change_and_have_state(matrix, group):
    for (mesh, kind), found in matrix[group].items():
        assert found["frozen"], mesh  # bit for bit, and without gradients
        numbers, factors = sum(found["trained"]), len(found["trained"])
        is_adamw = KINDS[kind][1] == "adamw"
        expected = 4 * (2 * numbers + factors) if is_adamw else 4 * numbers
        assert found["state"] == expected, mesh


@each_group
def test_first_values_are_those_of_one_process(matrix, group):
    for (_, kind), found in matrix[group].items():
        settings = settings_with(KINDS[kind][0])
        model = add_adapters(GPT(settings.model(VOCABULARY)), settings.lora_rank, 1.0)
        initialize_adapters(model, seed=0)
        named = {n: p for n, p in model.named_parameters() if "lora_" in n}
        assert found["first"].keys() == named.keys()
        assert all(torch.equal(found["first"][name], p) for name, p in named.items())


def test_first_values():
    model = add_adapters(GPT(GPTConfig(dim=96, heads=4)), 8, 1.0)
    initialize_adapters(model, seed=0)
    named = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [*named]
    assert all((p == 0).all() == name.endswith("_b") for name, p in named.items())
    for inputs in (96, 4 * 96):
        of_size = [p for n, p in named.items() if n.endswith("_a") and p.shape[1] == inputs]
        numbers = torch.cat([p.flatten() for p in of_size])
        assert numbers.std().item() == pytest.approx(inputs**-0.5, rel=0.05)
        assert len(numbers.unique()) > 0.99 * len(numbers)  # no factor has another one's


@pytest.mark.device
@pytest.mark.gpu_per_rank(2)
def test_fsdp_shards_every_factor(matrix, reference):
    shapes = [p.shape for p in reference["gpt2"]["parameters"].values()]
    expected = sum(-(-rows // 2) * columns for rows, columns in shapes)  # rank 0 has one row more
    assert sum(matrix["quick"]["--dp-shard 2", "gpt2"]["trained"]) == expected


@pytest.mark.device
@pytest.mark.gpu_per_rank(2)
@pytest.mark.parametrize(("kind", "columns", "rank"), [("gpt2", 4, 3), ("llama", 5, 4)])
def test_what_tensor_parallelism_sends(matrix, kind, columns, rank):
    """Activations as without adapters, and the gradients of the factors that every rank has.

    Activations are summed for the embedding, twice per block in forward, twice in backward, and for
    the head in backward; nothing needs the gradient of what the first block's attention reads.
    """
    activations = (1 + 4 + 3 + 1) * 16 * 16 * 24
    factors = 2 * (columns + 2) * 24 * rank  # A of columns, B of two row-parallel layers, 2 blocks
    sent = matrix["quick"]["--tp 2", kind]["sent"]
    sums = [n for (axis, call), n in sent.items() if call == "all_reduce" and "dp" not in axis]
    assert sum(sums) == 4 * (activations + factors)


@pytest.mark.parametrize("shape", [{}, {"architecture": "llama", "kv_heads": 2, "mlp_dim": 40}])
def test_flops_leave_out_the_gradients_of_frozen_weights(shape):
    config = GPTConfig(vocab_size=50, block_size=32, layers=2, heads=4, dim=24, **shape)
    model = add_adapters(GPT(config), 3, 6.0)
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.dim() > 1]
    weights = sum(n for name, n in named if "embedding" not in name and "lora" not in name)
    adapters = sum(n for name, n in named if "lora" in name)
    attention = config.flops_per_token(32) - 6 * weights
    assert flops_per_token(config, 32, 3) == 4 * weights + 6 * adapters + attention
    assert flops_per_token(config, 32, None) == config.flops_per_token(32)


# ---- the whole script, and the export

SIZES = ("--layers", 2, "--heads", 4, "--dim", 24, "--block-size", 32, "--architecture", "llama")
SIZES += ("--kv-heads", 2, "--mlp-dim", 40, "--norm-eps", 1e-6, "--batch-size", 8)
STEPS_OF_RUN = ("--steps", 6, "--log-every", 1, "--eval-every", 3, "--eval-batches", 1)
LORA = ("--lora-rank", 3, "--lora-alpha", 1, "--lr", 0.03)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama of transformers with random weights, in its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32}
    folder = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=p.dim() == 1, std=0.1)
    model.save_pretrained(folder)
    return folder


def trained(folder, base, *meshes) -> tuple[list[float], str]:
    """Losses of a run that is stopped once for each further mesh, and continued on it; output."""
    script, said = ROOT / "tests/workers/gpt_resume.py", ""
    for i, (ranks, flags) in enumerate(meshes):
        stop = 3 if i < len(meshes) - 1 else 0
        args = (*SIZES, *STEPS_OF_RUN, *LORA, "--sample", 4, "--init-from", base)
        args += ("--data", Path(re.__file__), "--output-dir", folder, *flags.split())
        said += pool.run(script, stop, *args, ranks=ranks).check().output
    lines = read_metrics(folder)
    return [value for line in lines for key, value in line.items() if key.endswith("loss")], said


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("run")
    return folder, *trained(folder, base, (1, ""))


@pytest.mark.slow
def test_the_script_says_what_it_trains(run):
    _, losses, said = run
    adapters = 2 * 3 * (2 * (24 + 24) + 2 * (24 + 12) + 3 * (24 + 40))
    whole = 2 * 256 * 24 + 24 + 2 * (2 * 24 + 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40) + adapters
    assert f"{adapters:,} of {whole:,} parameters are trained ({adapters / whole:.2%})" in said
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(run, base, tmp_path):
    meshes = (2, "--dp-shard 2"), (2, "--tp 2 --sequence-parallel")
    losses, said = trained(tmp_path, base, *meshes)
    assert "continuing from" in said
    assert len(losses) == 8
    assert losses == pytest.approx(run[1], abs=2e-5)


@pytest.mark.slow
def test_the_merged_model_is_the_formula(run, base, tmp_path):
    """transformers' model, whose weights are W + alpha / R * B A by hand, next to the export."""
    from transformers import AutoModelForCausalLM

    folder = run[0]
    said = python(ROOT / "transformer_basics/export.py", folder, tmp_path / "out").check().output
    assert float(re.search(r"differ by (\S+) at most", said)[1]) < 1e-5
    save = max((folder / "checkpoints").glob("step_*"))
    dcp_to_torch_save(save, tmp_path / "flat")
    saved = torch.load(tmp_path / "flat")["model"]
    expected = AutoModelForCausalLM.from_pretrained(base)
    theirs = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "out": "self_attn.o_proj"}
    theirs |= {"value": "self_attn.v_proj", "gate": "mlp.gate_proj", "expand": "mlp.up_proj"}
    theirs |= {"contract": "mlp.down_proj"}
    changes = 0
    for name, a in saved.items():
        if name.endswith(".lora_a"):
            _, i, _, layer, _ = name.split(".")
            weight = expected.get_submodule(f"model.layers.{i}.{theirs[layer]}").weight
            assert torch.equal(saved[name.replace("lora_a", "weight")], weight)  # as it was
            b = saved[name.replace("lora_a", "lora_b")]
            weight.data += 1 / 3 * torch.einsum("or,ri->oi", b, a)
            changes += 1
    assert changes == 14
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(256).view(8, 32)
    with torch.no_grad():
        logits, plain = (m(tokens).logits for m in (expected, exported))
        before = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
    torch.testing.assert_close(plain, logits, rtol=0, atol=1e-5)
    assert (before - logits).abs().max() > 1e-2


@pytest.mark.slow
def test_generate_uses_the_adapters(run, base, tmp_path):
    """Greedy: the text of the exported model, in which they are merged, and not of the base."""
    from transformers import AutoModelForCausalLM

    python(ROOT / "transformer_basics/export.py", run[0], tmp_path / "out").check()
    flags = ("--prompt", "import", "--tokens", 12, "--temperature", 0)
    script = ROOT / "transformer_basics/generate.py"
    written = [
        pool.run(script, run[0], *flags, *mesh, ranks=ranks).check().output
        for mesh, ranks in (((), 1), (("--cp", 2), 2))
    ]
    prompt, options = torch.tensor([list(b"import")]), {"max_new_tokens": 12, "do_sample": False}
    texts = []
    for folder in (tmp_path / "out", base):
        tokens = AutoModelForCausalLM.from_pretrained(folder).generate(prompt, **options)
        texts.append(bytes(tokens[0].tolist()).decode(errors="replace"))
    assert all(texts[0] in text and texts[1] not in text for text in written)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lora-rank", 4), "--lora-rank needs --init-from, the weights that stay frozen"),
        (("--lora-alpha", 4), "--lora-alpha needs --lora-rank"),
        (("--lora-rank", 0), "--lora-rank: must be an integer of at least 1, not 0"),
    ],
)
def test_wrong_flags_are_one_sentence(flags, says):
    result = python(ROOT / "transformer_basics/train.py", *flags)
    assert result.returncode == 2
    assert result.output.count("error:") == 1
    assert says in result.output


def test_alpha_is_twice_the_rank():
    assert Settings(lora_rank=4).on(1).lora_alpha == 8
    assert Settings(lora_rank=4, lora_alpha=3).on(1).lora_alpha == 3
    assert Settings().on(1).lora_alpha is None
