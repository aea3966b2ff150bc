"""transformer_basics: Llama, Mistral, Qwen2.5 and others go in, and come out as they were."""

import json
import sys

import flags
import pytest
import torch
from arguments import UserError
from checkpoint import save_checkpoint
from config import Settings
from export import export
from hugging_face import to_hugging_face
from metrics import peak_memory
from model import GPT, GPTConfig
from optimizer import make_optimizer
from parallelize import spread_model
from presets import PRESETS, VOCABULARIES
from pretrained import Weights, copy_weights, read_config, read_weights
from runtime import Worker
from safetensors.torch import load_file, save_file

# (class of transformers, its settings), and the settings of ours that say the same
SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 32, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 90.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "smollm2": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2.5": ("Qwen2", {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
}
OURS = {
    "llama": {"rope_theta": 90.0, "rope_scaling": (8.0, 1.0, 4.0, 16.0), "norm_eps": 1e-6},
    "smollm2": {"kv_heads": 1, "tied": True, "norm_eps": 1e-6},
    "mistral": {"window": 7, "norm_eps": 1e-6},
    "qwen2.5": {"qkv_bias": True, "norm_eps": 1e-6},
    "qwen3": {"head_dim": 16, "qk_norm": True, "norm_eps": 1e-6},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A tiny model with random values everywhere, its folder of several files, our settings."""
    import transformers

    name, more = FAMILIES[request.param]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**SIZES | more)
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=p.dim() == 1, std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="15KB")
    assert (folder / "model.safetensors.index.json").exists()
    shape = {"architecture": "llama", "kv_heads": 2, "mlp_dim": 40} | OURS[request.param]
    sizes = {"layers": 2, "heads": 4, "dim": 24, "block_size": 32}
    return model, folder, Settings(**sizes | shape, init_from=str(folder))


def test_a_family_goes_in_and_comes_out(group, family, tmp_path):
    """The logits of transformers; and what a checkpoint of ours exports is what was read."""
    theirs, folder, settings = family
    tokens = torch.randint(50, (3, 32), generator=torch.Generator().manual_seed(1))
    worker, settings = Worker(0, 0, 1, torch.device("cpu")), settings.on(1)
    config = read_config(settings, token_count=50)
    _, model, _ = spread_model(config, settings, worker.device)
    copy_weights(model, read_weights(settings, config))
    parts = {"model": model, "optimizer": make_optimizer(model, settings)}
    expected = theirs(tokens).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(model(tokens)[..., :50], expected, atol=1e-5, rtol=0)
    run = settings.identity() | {"steps": 1, "data": ""}
    run |= {"vocab_size": config.vocab_size, "token_count": 50}
    save_checkpoint(tmp_path / "checkpoints", parts, 1, run, worker)
    export(tmp_path / "checkpoints", tmp_path / "exported", worker)
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    before = {name: tensor for file in files for name, tensor in file.items()}
    after = load_file(tmp_path / "exported/model.safetensors")
    assert len(files) > 1
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = type(theirs).from_pretrained(tmp_path / "exported")
    assert torch.equal(again(tokens).logits, expected)


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"
BIAS, SECOND = "model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (DOWN, lambda t: t[:12], r"\[12, 40\].* not \[24, 40\]"),
        (DOWN, lambda t: t[:, :1], r"\[24, 1\].* not \[24, 40\]"),
        (NORM, lambda t: t[:12], r"\[12\].* not \[24\]"),
        ("model.embed_tokens.weight", lambda t: t[:49], r"\[49, 24\].* not \[50, 24\]"),
        (BIAS, lambda _: torch.zeros(24), "this GPT has no such weight"),
        (SECOND, lambda _: torch.zeros(24), "this GPT has no such weight"),
        (NORM, None, "has no weight"),
    ],
)
def test_weights_that_are_not_ours_are_refused(tmp_path, name, change, message):
    import transformers

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tensors = llama.state_dict()
    last = tensors.pop(name, None)
    if change:
        tensors[name] = change(last).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    shape = {"architecture": "llama", "kv_heads": 2, "mlp_dim": 40, "block_size": 32}
    model = GPT(GPTConfig(64, layers=2, heads=4, dim=24, token_count=50, **shape))
    with pytest.raises(UserError, match=message) as error:
        copy_weights(model, Weights(tmp_path, model.config))
    assert name in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_gpt2s_old_files_are_read(tmp_path):
    """Its masks are no weights; a tied head may be there or not; names lack the first word."""
    config = GPTConfig(50, 32, layers=1, heads=2, dim=8, tied=True)
    model, again = GPT(config), GPT(config)
    theirs = to_hugging_face(model.state_dict(), config)
    theirs = {name.removeprefix("transformer."): t.clone() for name, t in theirs.items()}
    theirs |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(1)}
    save_file(theirs, tmp_path / "model.safetensors")
    copy_weights(again, Weights(tmp_path, config))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )


def config_file(folder, name: str, **settings) -> str:
    """A folder that has a config.json only."""
    import transformers

    getattr(transformers, f"{name}Config")(**settings).save_pretrained(folder)
    return str(folder)


def test_a_quantised_folder_is_refused(tmp_path):
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = config_file(tmp_path, "Qwen3", **SIZES, quantization_config=scheme)
    with pytest.raises(UserError, match="is quantised: give the folder of the unquantised model"):
        read_config(Settings(init_from=folder), token_count=50)


def test_another_kind_of_rotary_positions_is_refused(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    folder = config_file(tmp_path, "Llama", **SIZES, rope_parameters=rope)
    with pytest.raises(UserError, match="yarn: give a model with rope_type default or llama3"):
        read_config(Settings(init_from=folder), token_count=50)


MISTRAL = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
MISTRAL |= {"num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5}
MISTRAL |= {"max_position_embeddings": 32768, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("other", "theirs", "messages"),
    [
        ({"window": 4096}, {}, ["; leave out --window, or the --preset that sets it"]),
        ({"rope_scaling": (8, 1, 4, 64)}, {}, ["; leave out --window and --rope-scaling, or"]),
        ({"window": 9}, {"sliding_window": 4096}, ["--window 4096"]),
        ({"window": None, "qkv_bias": True}, {}, ["--no-qkv-bias"]),
        ({}, {"rope_theta": 1234567.5}, ["--rope-theta 1234567.5", "; leave out --window,"]),
        ({"rope_theta": 7.0}, {"rope_theta": 1e4}, ["--rope-theta 10000.0"]),  # our default
    ],
)
def test_the_advice_names_all_that_differs(tmp_path, monkeypatch, other, theirs, messages):
    """And to follow it is enough."""
    theirs = {"sliding_window": None, "rope_theta": 1e6} | theirs
    rope = {"rope_type": "default", "rope_theta": theirs.pop("rope_theta")}
    folder = config_file(tmp_path, "Mistral", **MISTRAL, **theirs, rope_parameters=rope)
    ours = PRESETS["mistral-7b"] | {"rope_theta": 1e6} | other
    with pytest.raises(UserError) as error:
        read_config(Settings(**ours, init_from=folder), token_count=50)
    assert all(message in str(error.value) for message in messages), error.value
    advice = str(error.value).split("it fits ")[1].split(";")[0]
    monkeypatch.setattr(sys, "argv", ["train.py", *advice.split(), "--init-from", folder])
    read_config(flags.parse_args(), token_count=50)


def test_a_shard_is_read_without_the_rest(tmp_path):
    """Of a weight of 1 GB, of which no number takes room on the disk."""
    shape = [250_000, 1000]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 10**9]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**9)
    weights = Weights(tmp_path, GPTConfig(architecture="llama"))
    before = peak_memory(torch.device("cpu"))["memory_mb"]
    shard = weights["token_embedding.weight"][1000:1010].clone()
    assert shard.shape == (10, 1000)
    assert peak_memory(torch.device("cpu"))["memory_mb"] < before + 100


@pytest.mark.parametrize(
    ("name", "parameters"),  # as their authors count; GPT-2's without the biases of its keys
    [
        ("gpt2-124m", 124_439_808 - 12 * 768),
        ("gpt2-1.5b", 1_557_611_200 - 48 * 1600),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_a_preset_has_the_parameters_of_its_model(name, parameters):
    with torch.device("meta"):
        model = GPT(GPTConfig(VOCABULARIES[name], **PRESETS[name]))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_flags_override_a_preset(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--preset", "smollm2-135m", "--layers", "2"])
    settings = flags.parse_args()
    assert (settings.layers, settings.heads, settings.kv_heads) == (2, 9, 3)
    assert (settings.architecture, settings.rope_theta, settings.tied) == ("llama", 1e5, True)
    more = ["--no-tied", "--rope-scaling", "8", "1", "4", "8"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *more])
    settings = flags.parse_args()
    assert (settings.tied, settings.rope_scaling) == (False, (8.0, 1.0, 4.0, 8.0))
