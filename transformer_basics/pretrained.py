"""Start from pretrained weights: a GPT-2 in Hugging Face's format."""

from collections.abc import Callable

import torch
from arguments import UserError
from config import Settings
from model import GPT, GPTConfig, from_hugging_face
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def read_config(settings: Settings, token_count: int) -> GPTConfig:
    """The sizes of the model that --init-from names.

    token_count: tokens of the training text are below this number.
    Raises `UserError` if the model is no GPT-2, and if its sizes are not those of the flags.
    """
    from transformers import AutoConfig

    name = settings.init_from
    theirs = loaded(name, AutoConfig.from_pretrained)
    check_kind(name, theirs)
    check_sizes(name, theirs, settings, token_count)
    return settings.model(theirs.vocab_size)


def read_weights(settings: Settings, config: GPTConfig) -> dict[str, Tensor]:
    """All weights of the --init-from model under our names, on the CPU; for `copy_weights`."""
    from transformers import GPT2LMHeadModel

    state = loaded(settings.init_from, GPT2LMHeadModel.from_pretrained).state_dict()
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"][: config.block_size]
    weights = from_hugging_face(state, config)
    if config.tied:  # one weight under two names
        del weights["head.weight"]
    return weights


def loaded(name: str, load: Callable):
    try:
        return load(name)
    except (OSError, ValueError, RuntimeError) as error:  # what transformers raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load --init-from {name}: {reason}") from None


def check_kind(name: str, theirs) -> None:
    """Raises `UserError` for a model that does not compute what our GPT computes."""
    if theirs.model_type != "gpt2":
        raise UserError(f"--init-from {name} is a {theirs.model_type}: only GPT-2 has these layers")
    for key, value, ours in (
        ("activation_function", theirs.activation_function, "gelu_new"),
        ("layer_norm_epsilon", theirs.layer_norm_epsilon, 1e-5),
        ("n_inner", theirs.n_inner or 4 * theirs.n_embd, 4 * theirs.n_embd),
        ("scale_attn_weights", theirs.scale_attn_weights, True),
        ("scale_attn_by_inverse_layer_idx", theirs.scale_attn_by_inverse_layer_idx, False),
    ):
        if value != ours:
            raise UserError(f"--init-from {name} has {key} {value}, this GPT {ours}")


def check_sizes(name: str, theirs, settings: Settings, token_count: int) -> None:
    """Raises `UserError` with the flags that fit the weights."""
    sizes = {"--layers": theirs.n_layer, "--heads": theirs.n_head, "--dim": theirs.n_embd}
    given = {"--layers": settings.layers, "--heads": settings.heads, "--dim": settings.dim}
    if sizes != given or settings.block_size > theirs.n_positions:
        sizes["--block-size"] = min(settings.block_size, theirs.n_positions)
        flags = " ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise UserError(f"--init-from {name} has other sizes: it fits {flags}")
    if settings.tied and not theirs.tie_word_embeddings:
        raise UserError(f"--init-from {name} has a head of its own: leave out --tied")
    if token_count > theirs.vocab_size:
        raise UserError(
            f"--init-from {name} knows {theirs.vocab_size} tokens, the text has {token_count}: "
            f"give --tokenizer {name}"
        )


@torch.no_grad()
def copy_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Every rank has all `weights` and keeps its shard of each, without communication."""
    for name, parameter in model.named_parameters():
        weight = weights[name].to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            weight = distribute_tensor(weight, mesh, placements, src_data_rank=None)
        parameter.copy_(weight)
