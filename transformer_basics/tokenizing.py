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
    checksum: str  # of the vocabulary: another tokenizer of this name has another one
    render: Callable[[list[dict], bool], str] | None = None  # the chat template; None: it has none

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
    Raises `UserError` if the tokenizer cannot be loaded.
    """
    if name is None:

        def decode_bytes(tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

        return Tokenizer(None, lambda text: list(text.encode()), decode_bytes, 256, 0, "bytes")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load --tokenizer {name}: {reason}") from None

    def encode(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False)

    def chat_template(messages: list[dict], asks_for_answer: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": asks_for_answer}
        return loaded.apply_chat_template(messages, **options)

    vocabulary = json.dumps(sorted(loaded.get_vocab().items(), key=lambda item: item[1]))
    checksum = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
    end = loaded.eos_token_id or 0
    render = chat_template if loaded.chat_template else None
    name = str(Path(name).resolve()) if Path(name).is_dir() else name
    return Tokenizer(name, encode, loaded.decode, len(loaded), end, checksum, render)


def ids(text: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of one document, and the token that ends it."""
    text = text.decode(errors="replace")
    if tokenizer.name is None:
        found = np.frombuffer(text.encode(), np.uint8)
    else:
        found = np.array(tokenizer.encode(text), np.int64)
    return np.append(found, tokenizer.end).astype(tokenizer.dtype)
