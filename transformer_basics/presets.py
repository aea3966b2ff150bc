"""Shapes of published models, for --preset: what their config.json files say.

block_size is the length of the sequences of their pretraining; longer ones fit rotary positions.
"""

GPT2 = {"architecture": "gpt2"}
LLAMA = {"architecture": "llama", "rope_theta": 500_000.0}
LLAMA_1B = LLAMA | {"rope_scaling": (32.0, 1.0, 4.0, 8192.0)}
LLAMA_8B = LLAMA | {"rope_scaling": (8.0, 1.0, 4.0, 8192.0)}
MISTRAL = {"architecture": "llama", "rope_theta": 10_000.0, "window": 4096}
QWEN25 = {"architecture": "llama", "rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
QWEN3 = {"architecture": "llama", "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
SMOLLM2 = {"architecture": "llama", "rope_theta": 100_000.0}

NAMES = ("layers", "dim", "heads", "kv_heads", "head_dim", "mlp_dim", "block_size", "tied")
SHAPES = {  # None: follows from the width and the heads, see GPTConfig
    "gpt2-124m": (GPT2, 50257, (12, 768, 12, None, None, None, 1024, True)),
    "gpt2-1.5b": (GPT2, 50257, (48, 1600, 25, None, None, None, 1024, True)),
    "smollm2-135m": (SMOLLM2, 49152, (30, 576, 9, 3, 64, 1536, 2048, True)),
    "qwen2.5-0.5b": (QWEN25, 151936, (24, 896, 14, 2, 64, 4864, 4096, True)),
    "qwen2.5-7b": (QWEN25, 152064, (28, 3584, 28, 4, 128, 18944, 4096, False)),
    "qwen3-0.6b": (QWEN3, 151936, (28, 1024, 16, 8, 128, 3072, 4096, True)),
    "llama-3.2-1b": (LLAMA_1B, 128256, (16, 2048, 32, 8, 64, 8192, 8192, True)),
    "mistral-7b": (MISTRAL, 32000, (32, 4096, 32, 8, 128, 14336, 8192, False)),
    "llama-3.1-8b": (LLAMA_8B, 128256, (32, 4096, 32, 8, 128, 14336, 8192, False)),
    "qwen3-8b": (QWEN3, 151936, (36, 4096, 32, 8, 128, 12288, 4096, False)),
}
# The fields of GPTConfig and of Settings but for the vocabulary, which a text may change.
PRESETS = {
    name: family | dict(zip(NAMES, numbers, strict=True))
    for name, (family, _, numbers) in SHAPES.items()
}
VOCABULARIES = {name: vocabulary for name, (_, vocabulary, _) in SHAPES.items()}
