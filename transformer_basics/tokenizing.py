"""Text to token ids: one token per byte, or a Hugging Face tokenizer."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import UserError


@dataclass(frozen=True)
class Tokenizer:
    name: str | None  # as given; None: bytes
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    token_count: int  # ids are below it
    end: int  # the id of the token that ends a document
    checksum: str  # of all that decides the ids of a text: if it differs, they may differ
    render: Callable[[list[dict], bool], str] | None = None  # the chat template; None: it has none
    begin: int | None = None  # the id of the token that begins a text; None: it has none
    # Text -> (id, index of its first character) of each token. Only of a tokenizer that puts a
    # blank before each text, as that of Llama 2: a text in two parts has one blank more.
    places: Callable[[str], list[tuple[int, int]]] | None = None
    template: str | None = None  # the text of the chat template: if it differs, chats may differ

    def of_prompt(self, text: str) -> list[int]:
        """The ids of a text to continue. Raises `UserError` if there are none."""
        found = self.encode(text)
        if not found:
            raise UserError(f"--prompt {text!r} has no tokens: give more text")
        return [*self.begins, *found]

    @property
    def begins(self) -> list[int]:
        return [] if self.begin is None else [self.begin]

    @property
    def vocab_size(self) -> int:
        """token_count, rounded up: GPT-2's 50,257 rows divide by no usual number of ranks."""
        return -(-self.token_count // 64) * 64

    @property
    def dtype(self) -> str:
        """The smallest of two dtypes that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


def load_tokenizer(name: str | None) -> Tokenizer:
    """name: id on the Hugging Face hub or a directory; None: one token per byte, 0 ends a document.

    A directory becomes an absolute path, so that generate.py and export.py find it from any other.
    Raises `UserError` if the tokenizer cannot be loaded, and if it has no token that ends a text.
    """
    if name is None:

        def decode_bytes(tokens: list[int]) -> str:
            # Weights of --init-from may have more tokens than bytes: a question mark for these.
            return bytes(t if t < 256 else ord("?") for t in tokens).decode(errors="replace")

        return Tokenizer(None, lambda text: list(text.encode()), decode_bytes, 256, 0, "bytes")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a broken file raises an Exception of the library in Rust
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load --tokenizer {name}: {reason}") from None

    def encode(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False)

    def chat_template(messages: list[dict], asks_for_answer: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": asks_for_answer}
        return loaded.apply_chat_template(messages, **options)

    def places(text: str) -> list[tuple[int, int]]:
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        found = loaded(text, **options)
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return [(token, first) for token, (first, _) in pairs]

    end = loaded.eos_token_id
    if end is None:
        raise UserError(
            f"--tokenizer {name} has no end token: set eos_token in its tokenizer_config.json"
        )
    first, alone = loaded.encode("a")[:1], encode("a")[:1]
    begin = loaded.bos_token_id if first == [loaded.bos_token_id] != alone else None
    puts_a_blank = any(t.startswith("\u2581") for t in loaded.convert_ids_to_tokens(alone))
    decides = json.dumps([end, *([] if begin is None else [begin]), what_decides_ids(loaded)])
    checksum = hashlib.sha256(decides.encode()).hexdigest()[:16]
    render = chat_template if loaded.chat_template else None
    name = str(Path(name).resolve()) if Path(name).is_dir() else name
    count = max(len(loaded), 1 + max(loaded.get_vocab().values()))  # some have gaps
    places = places if loaded.is_fast and puts_a_blank else None
    template = json.dumps(loaded.chat_template)
    own = (checksum, render, begin, places, template)
    return Tokenizer(name, encode, loaded.decode, count, end, *own)


def what_decides_ids(loaded) -> list:
    """The parts of a tokenizer of transformers without which a text could get other ids."""
    if not loaded.is_fast:
        return sorted(loaded.get_vocab().items(), key=lambda item: item[1])
    parts = json.loads(loaded.backend_tokenizer.to_str())
    return [parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")]


def ids(text: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of one document, between the tokens that begin and end it, if there are such."""
    text = text.decode(errors="replace")
    if tokenizer.name is None:
        found = np.frombuffer(text.encode(), np.uint8)
    else:
        found = np.array(tokenizer.encode(text), np.int64)
    begins = np.array(tokenizer.begins, found.dtype)
    return np.concatenate([begins, found, [tokenizer.end]]).astype(tokenizer.dtype)
