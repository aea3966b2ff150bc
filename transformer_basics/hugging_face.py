"""The same models in Hugging Face's transformers: settings and names of GPT-2, Llama and kin."""

from collections.abc import Callable

import torch
from arguments import UserError
from model import GPTConfig
from torch import Tensor

# Ours -> theirs; after each follows ".weight" or ".bias" in both.
GPT2_ENDS = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",  # one matrix for all three
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expand": "mlp.c_fc",
    "mlp.contract": "mlp.c_proj",
}
LLAMA_ENDS = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.expand": "mlp.up_proj",
    "mlp.contract": "mlp.down_proj",
}
FUSED = ("attention.query", "attention.key", "attention.value")  # the order in GPT-2's matrix
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def their_name(name: str, config: GPTConfig) -> str:
    layer, _, kind = name.rpartition(".")
    if not layer.startswith("blocks."):
        return f"{(LLAMA_ENDS if config.is_llama else GPT2_ENDS)[layer]}.{kind}"
    _, i, part = layer.split(".", 2)
    if config.is_llama:
        return f"model.layers.{i}.{LLAMA_BLOCK[part]}.{kind}"
    return f"transformer.h.{i}.{GPT2_BLOCK[part]}.{kind}"


def from_hugging_face(name: str, read: Callable[[str], Tensor], config: GPTConfig) -> Tensor:
    """Our parameter `name`, a view of theirs. read: their name -> the tensor.

    GPT-2's layers compute x @ weight: their matrices are transposed. The bias of its keys is left
    out: it has no effect.
    """
    tensor, part = read(their_name(name, config)), name.rpartition(".")[0].split(".", 2)[-1]
    if config.is_llama or part in GPT2_ENDS:
        return tensor[: config.block_size] if part == "position_embedding" else tensor
    tensor = tensor.T if tensor.dim() == 2 else tensor
    return tensor.chunk(3)[FUSED.index(part)] if part in FUSED else tensor


def to_hugging_face(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our full state dict -> theirs, without the rows that pad the vocabulary."""
    new = {}
    for name, tensor in state.items():
        if name in ("token_embedding.weight", "head.weight"):
            tensor = tensor[: config.token_count]
        new.setdefault(their_name(name, config), []).append(tensor)
    for name, parts in new.items():
        if name.endswith("c_attn.bias"):  # query and value
            parts.insert(1, torch.zeros_like(parts[0]))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        is_transposed = ".h." in name and tensor.dim() == 2
        new[name] = tensor.T.contiguous() if is_transposed else tensor
    return new


def shape_of(theirs) -> dict:
    """A configuration of transformers -> the fields of `GPTConfig` but for vocab_size.

    block_size is the longest sequence. Raises `UserError`, without the name of the model, for one
    that does not compute what ours computes.
    """
    if getattr(theirs, "quantization_config", None):  # its weights count only with their scales
        raise UserError("is quantised: give the folder of the unquantised model (bf16 or fp32)")
    if theirs.model_type == "gpt2":
        refuse(
            ("activation_function", theirs.activation_function, "gelu_new"),
            ("scale_attn_weights", theirs.scale_attn_weights, True),
            ("scale_attn_by_inverse_layer_idx", theirs.scale_attn_by_inverse_layer_idx, False),
        )
        return {
            "layers": theirs.n_layer,
            "heads": theirs.n_head,
            "dim": theirs.n_embd,
            "mlp_dim": theirs.n_inner,
            "norm_eps": theirs.layer_norm_epsilon,
            "block_size": theirs.n_positions,
            "tied": theirs.tie_word_embeddings,
        }
    if theirs.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise UserError(f"is a {theirs.model_type}: none of gpt2, llama, mistral, qwen2 and qwen3")
    rope = theirs.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise UserError(f"has rope_type {kind}: give a model with rope_type default or llama3")
    refuse(
        ("hidden_act", theirs.hidden_act, "silu"),
        ("attention_bias", getattr(theirs, "attention_bias", False), False),
        ("mlp_bias", getattr(theirs, "mlp_bias", False), False),
        ("use_sliding_window", getattr(theirs, "use_sliding_window", False), False),
    )
    return {
        "architecture": "llama",
        "layers": theirs.num_hidden_layers,
        "heads": theirs.num_attention_heads,
        "kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None),
        "dim": theirs.hidden_size,
        "mlp_dim": theirs.intermediate_size,
        "qkv_bias": theirs.model_type == "qwen2",  # of Qwen2.5, too
        "qk_norm": theirs.model_type == "qwen3",
        "window": theirs.sliding_window if theirs.model_type == "mistral" else None,
        "norm_eps": theirs.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": tuple(rope[key] for key in LLAMA3) if kind == "llama3" else None,
        "block_size": theirs.max_position_embeddings,
        "tied": theirs.tie_word_embeddings,
    }


def refuse(*settings: tuple[str, object, object]) -> None:
    """Raises `UserError` for a setting (key, value, ours) whose value is not ours."""
    for key, value, ours in settings:
        if value != ours:
            raise UserError(f"has {key} {value}, this GPT {ours}")


def their_config(config: GPTConfig, end: int, begin: int | None = None):
    """The configuration of transformers for our model.

    end, begin: the tokens that end and begin a document; None: no token begins it.

    Raises `UserError` for a model that none of them computes.
    """
    from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    tokens = config.token_count or config.vocab_size
    common = {"vocab_size": tokens, "tie_word_embeddings": config.tied}
    common |= {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
    if not config.is_llama:
        if config.qk_norm or config.window or config.kv_heads < config.heads:
            raise UserError("transformers' GPT-2 has no --qk-norm, --window or --kv-heads")
        if config.head_dim * config.heads != config.dim:
            raise UserError("transformers' GPT-2 has no --head-dim: there it is --dim / --heads")
        return GPT2Config(
            **common,
            n_positions=config.block_size,
            n_layer=config.layers,
            n_head=config.heads,
            n_embd=config.dim,
            n_inner=config.mlp_dim,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    makers = {"qkv_bias": Qwen2Config, "qk_norm": Qwen3Config, "window": MistralConfig}
    wanted = [name for name in makers if getattr(config, name)]
    if len(wanted) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in wanted)
        raise UserError(f"transformers has no model with {flags} on all layers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        *factors, length = config.rope_scaling
        rope |= {"rope_type": "llama3"}
        rope |= dict(zip(LLAMA3, [*factors, int(length)], strict=True))
    common |= {"sliding_window": config.window} if config.window else {}
    return (makers[wanted[0]] if wanted else LlamaConfig)(
        **common,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.dim,
        intermediate_size=config.mlp_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=config.block_size,
    )
