"""task.py for a Llama of transformers, on the source code of Python's standard library.

    cp -r fsdp_basics my_llama
    cp my_llama/examples/llama.py my_llama/task.py
    torchrun --standalone --nproc_per_node=2 my_llama/train.py --epochs 1

--model NAME starts from the weights and the tokenizer of a model on the Hugging Face hub, or in a
local directory. Without it, a small model starts from random weights, with one token per byte.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from arguments import UserError, at_least
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

FILES = ("argparse.py", "ast.py", "heapq.py", "inspect.py", "statistics.py", "textwrap.py")


@dataclass(frozen=True)
class TaskSettings:
    model: str | None = None
    length: int = 128
    activation_checkpointing: bool = False


def add_flags(add: Callable) -> None:
    add("--model", help="id on the Hugging Face hub or local directory (default: a new small one)")
    add("--length", type=at_least(2), help="tokens per sequence")
    add("--activation-checkpointing", action="store_true", help="recompute layers in backward")


def download(settings: TaskSettings) -> None:
    pass  # from_pretrained() does: the weights on rank 0, the small files on every rank


def load_data(settings: TaskSettings) -> tuple[Dataset, Dataset]:
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((folder / name).read_text() for name in FILES)
    if settings.model:
        tokens = load_tokenizer(settings.model)(text)["input_ids"]
    else:
        tokens = list(text.encode())
    rows = torch.tensor(tokens[: len(tokens) // settings.length * settings.length])
    rows = rows.view(-1, settings.length)
    return rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]  # a tensor is a data set


def load_tokenizer(model: str):
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--model {model} has no tokenizer that can be loaded: {reason}") from None


collate = None


def build_model(settings: TaskSettings) -> nn.Module:
    if settings.model is None:
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))
    elif torch.get_default_device().type == "meta":  # only shapes are needed: read no weights
        config = AutoConfig.from_pretrained(settings.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def units(model: nn.Module) -> list[nn.Module | list[nn.Module]]:
    if model.config.tie_word_embeddings:  # one matrix, used first and last: leave it to the root
        return [*model.model.layers]
    return [model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head]]


def compute_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
    logits = model(input_ids=batch, use_cache=False).logits.float()
    targets = F.pad(batch[:, 1:], (0, 1), value=-100)  # the next token; the last is not counted
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss_sum, batch[:, 1:].numel(), {"accuracy": (logits.argmax(dim=-1) == targets).sum()}
