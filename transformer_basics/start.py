"""Start a run from its newest checkpoint, from pretrained weights, or from initial values."""

from pathlib import Path

from arguments import UserError
from checkpoint import read_run, resume, saves
from config import Settings
from data import Corpus
from lora import initialize_adapters
from model import GPTConfig, initialize
from pretrained import copy_weights, read_config, read_weights
from runtime import Worker


def model_config(settings: Settings, corpus: Corpus, folder: Path | None) -> GPTConfig:
    """The model of the flags, with the vocabulary of the continued run, or of --init-from.

    folder: the checkpoints, or None.
    Raises `UserError` if --init-from does not fit the flags, or --pad-vocab-to the continued run.
    """
    for save in reversed(saves(folder) if folder else []):
        try:
            run = read_run(save)["run"]
            rows = run["vocab_size"]
        except (UserError, KeyError):  # broken or foreign: `resume` says so
            continue
        if settings.pad_vocab_to not in (None, rows):
            raise UserError(
                f"the embedding of {folder} has {rows} rows, not --pad-vocab-to "
                f"{settings.pad_vocab_to}: choose another --output-dir"
            )
        return settings.model(rows, run.get("token_count"))
    if settings.init_from:
        return read_config(settings, corpus.tokenizer.token_count)
    return settings.padded_model(corpus.tokenizer.token_count)


def resume_or_initialize(
    folder: Path | None, parts: dict, run: dict, settings: Settings, worker: Worker
) -> tuple[int, dict]:
    """All ranks call this. Give the model its values; returns the steps done, and the saved run.

    Only if there is no checkpoint, it reads --init-from or draws initial values. A rank draws only
    its shards; no rank has the full model.
    """
    step, saved_run = 0, {}
    if folder:
        # The checksum of the tokens is that of a tokenizer, whose directory may move.
        may_change = ("steps", "tokenizer", "mesh")
        identity = {name: value for name, value in run.items() if name not in may_change}
        step, saved_run = resume(folder, parts, identity, worker)
    if step > settings.steps:
        raise UserError(
            f"{folder} is at step {step}, beyond --steps {settings.steps}: choose more steps, or "
            "another --output-dir"
        )
    if step:
        if worker.is_main and saved_run["steps"] != settings.steps:
            print(
                f"planned for {saved_run['steps']} steps, now for {settings.steps}: from here on "
                "the learning rate follows the new schedule"
            )
    else:
        if settings.init_from:
            tokens = parts["model"].config.token_count
            if worker.is_main and run["tokenizer"] is None and tokens not in (None, 256):
                print(
                    f"warning: --init-from {settings.init_from} has {tokens} tokens, and the text "
                    "is read as bytes: give its --tokenizer, unless it was trained on bytes"
                )
            copy_weights(parts["model"], read_weights(settings, parts["model"].config))
        else:
            initialize(parts["model"], settings.seed)
        initialize_adapters(parts["model"], settings.seed)
    return step, saved_run
