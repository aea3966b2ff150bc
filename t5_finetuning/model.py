"""Load a T5 of the Hugging Face hub or configure a small new T5; export it in their format."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from alone import on_rank_0
from arguments import DiskError, UserError
from data import JsonLines
from runtime import Worker
from safetensors import SafetensorError
from task import DROPOUT, MODEL, MODEL_TYPE, new_config
from tokenizer import train_tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig


def prepare(settings, train_set: JsonLines) -> tuple[PreTrainedConfig, GenerationConfig, object]:
    """(config, generation config, tokenizer) of --model, or of a new small model."""
    if settings.model:
        config = from_hub(AutoConfig, settings.model)
        if config.model_type != MODEL_TYPE:
            raise UserError(
                f"--model {settings.model} is of type {config.model_type}, not {MODEL_TYPE}"
            )
        if not hasattr(config, DROPOUT):
            raise UserError(
                f"the configuration of --model {settings.model} has no {DROPOUT}: set DROPOUT in "
                "task.py to its name of the dropout"
            )
        setattr(config, DROPOUT, settings.dropout)
        try:
            generation = GenerationConfig.from_pretrained(settings.model)
        except OSError:  # it has none
            generation = GenerationConfig.from_model_config(config)
        return config, generation, from_hub(AutoTokenizer, settings.model)

    def texts() -> Iterator[str]:
        return (text for pair in train_set for text in (pair.text, pair.summary))

    tokenizer = train_tokenizer(texts, settings.vocab_size)
    config = new_config(settings, tokenizer)
    return config, GenerationConfig.from_model_config(config), tokenizer


def from_hub(kind: type, name: str, **options):
    """`kind`.from_pretrained(name). Raises `UserError` with one sentence, whatever goes wrong."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        what = kind.__name__.removeprefix("Auto").removeprefix("T5For")
        raise UserError(
            f"--model {name}: no {what} to be had ({type(error).__name__}): it must be the id of a "
            "T5 on the Hugging Face hub, with a network or downloaded before, or a local directory"
        ) from None


def export(model, config: PreTrainedConfig, tokenizer, folder: Path, worker: Worker) -> None:
    """Save the sharded model as `folder`, for from_pretrained(); all ranks call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(model, options=options)  # full on rank 0, empty elsewhere

    def write() -> None:
        with torch.device("meta"):  # an unsharded model without a second copy of the values
            plain = MODEL(config)
        plain.generation_config = model.generation_config
        plain.load_state_dict(values, assign=True)
        plain.tie_weights()  # assign=True has turned the shared matrix into four
        temporary, old = folder.with_name("model.tmp"), folder.with_name("model.old")
        try:
            for part in (plain, tokenizer):
                part.save_pretrained(temporary)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk no checkpoint would fit
            raise DiskError(f"cannot write {folder}: {error}") from None

    on_rank_0(write, worker, f"writing {folder}")


@contextmanager
def gathered(model):
    """Inside, parameters stay gathered: one all_gather per summary instead of one per token.

    It costs each rank the memory of the full model, in --precision. Leave it out for a model that
    fits on no single device: generate() then also works, but slowly.
    """
    model.set_reshard_after_forward(False)
    yield
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the root: backward needs it first
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # or the next forward could use old values
