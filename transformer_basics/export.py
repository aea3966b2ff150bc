"""Export a checkpoint of train.py, from any mesh, as a model of Hugging Face's transformers.

    python transformer_basics/train.py --steps 100 --output-dir runs/gpt
    python transformer_basics/export.py runs/gpt exported

One process reads all shards. This code then works without train.py, and writes text:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("exported")
    model = AutoModelForCausalLM.from_pretrained("exported")
    tokens = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50)
    print(tokenizer.decode(tokens[0]))
"""

from pathlib import Path

import torch
from arguments import ArgumentParser, UserError
from checkpoint import load_model
from config import saved_config
from hugging_face import their_config, to_hugging_face
from lora import add_adapters, merged_state
from model import GPT
from runtime import Worker, distributed_worker
from tokenizing import load_tokenizer
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker("cpu") as worker:
        export(args.run / "checkpoints", args.folder, worker)


def export(checkpoint: Path, folder: Path, worker: Worker) -> None:
    """Write config.json, model.safetensors and the tokenizer into `folder`; adapters are merged.

    Raises `UserError` in a job of several ranks, and if `folder` is not empty.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if worker.world_size > 1:
        raise UserError("one process reads all shards: start it with python, not with torchrun")
    if folder.is_file():
        raise UserError(f"{folder} is a file")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty")

    model, run = load_model(checkpoint, saved_model, worker)
    config, named = model.config, run["tokenizer"]
    ours = load_tokenizer(named)  # raises `UserError` if it is not there any more
    tokenizer = AutoTokenizer.from_pretrained(named) if named else byte_tokenizer()
    theirs = AutoModelForCausalLM.from_config(their_config(config, ours.end, ours.begin))
    theirs.load_state_dict(to_hugging_face(merged_state(model), config))
    logging.disable_progress_bar()
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    count = min(config.block_size, config.token_count or config.vocab_size, 512)
    tokens = torch.arange(count)[None]
    with torch.no_grad():
        ours = model(tokens)[..., : config.token_count]
        difference = (ours - theirs.eval()(tokens).logits).abs().max().item()
    print(f"{folder}: the logits of both models differ by {difference:.1g} at most")


def saved_model(run: dict) -> GPT:
    """The model of a run, with its adapters, if any; for `load_model`."""
    model = GPT(saved_config(run))
    if run.get("lora_rank"):
        add_adapters(model, run["lora_rank"], run["lora_alpha"])
    return model


def byte_tokenizer():
    """A tokenizer of transformers with one token per byte: the id is the byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level tokenizers write each byte as a visible character. As in GPT-2, a printable byte
    # stands for itself, and all other bytes stand for characters from 256 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    vocabulary = {chr(byte): byte for byte in seen}
    vocabulary |= {chr(256 + i): byte for i, byte in enumerate(unseen)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def parse_args():
    parser = ArgumentParser(description="Export a GPT to Hugging Face's format.")
    parser.add_argument("run", type=Path, help="--output-dir of train.py")
    parser.add_argument("folder", type=Path, help="folder to write, new or empty")
    return parser.parse_args()


if __name__ == "__main__":
    main()
