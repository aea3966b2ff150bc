"""transformer_basics: Llama, Mistral, Qwen2.5 and others go in, and come out as they were."""

import json
import sys

import flags
import pytest
import torch
from checkpoint import save_checkpoint
from config import Settings
from export import export
from metrics import peak_memory
from model import GPT, GPTConfig
from optimizer import make_optimizer
from parallelize import spread_model
from presets import PRESETS, VOCABULARIES
from pretrained import Weights, copy_weights, read_config, read_weights
from runtime import Worker
from safetensors.torch import load_file

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
