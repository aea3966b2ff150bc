r"""Chats to tokens, and which of them count in the loss: those that the assistant writes.

A line of the file is one chat: {"messages": [{"role": "user", "content": "Hi"}, ...]}, with the
roles system, user and assistant. The loss counts the tokens of each answer and the token that ends
it. All other tokens are read, not learned: the model sees a prompt, and need not write it.

If the tokenizer has a chat template, the chat is what the template makes of it. An answer then
begins where the template asks for one (add_generation_prompt), and the text before it is tokenised
apart, as it is when the model is used (but for tokenizers that put a blank before each text).
Without a template, each message is `role: content` and the token that ends a document:
"user: Hi<end>assistant: Hello<end>".
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
from arguments import UserError
from tokenizing import Tokenizer

ROLES = ("system", "user", "assistant")


def chats_of(name: str) -> Iterator[tuple[bytes, list[dict], str]]:
    """(line, its messages, its place in words) of each chat. Raises `UserError`, with the place."""
    with Path(name).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"line {number} of {name}"
                yield line.strip(), messages_in(line, place), place


def messages_in(line: bytes, place: str) -> list[dict]:
    try:
        chat = json.loads(line)
    except ValueError:
        raise UserError(f"{place} is no JSON: the file must have one chat per line") from None
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{place} has no chat: {{"messages": [{{"role": ..., "content": ...}}]}}')
    for message in messages:
        message = message if isinstance(message, dict) else {}
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise UserError(
                f"{place} has a message without a text in 'content', or whose 'role' is none of "
                f"{', '.join(ROLES)}"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{place} has no message of the assistant: nothing in it counts")
    # JSON can hold half a pair of surrogates, which is no text.
    cleaned = [m["content"].encode(errors="replace").decode() for m in messages]
    return [m | {"content": text} for m, text in zip(messages, cleaned, strict=True)]


def tokens_of_chat(
    messages: list[dict], tokenizer: Tokenizer, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids, in the dtype of `tokenizer`, and for each of them whether it counts.

    Raises `UserError`, with the place of the chat, if the template does not take it.
    """
    found = list(segments(messages, tokenizer, place))
    if tokenizer.render and tokenizer.places:
        pairs = pairs_of_one_text(found, tokenizer)
    else:
        pairs = [(token, False) for token in tokenizer.begins * (tokenizer.render is None)]
        for text, is_answer, ends in found:
            added = tokenizer.encode(text) + [tokenizer.end] * ends
            pairs += [(token, is_answer) for token in added]
    tokens, counts = zip(*pairs, strict=True)
    return np.array(tokens, tokenizer.dtype), np.array(counts, bool)


def pairs_of_one_text(found: list[tuple], tokenizer: Tokenizer) -> list[tuple[int, bool]]:
    """(token id, whether it counts): one blank before the whole, not one before each segment.

    found: the `segments`. A token that crosses a border counts as its first character does.
    """
    ends = list(accumulate(len(text) for text, _, _ in found))
    return [
        (token, found[min(bisect_right(ends, first), len(found) - 1)][1])
        for token, first in tokenizer.places("".join(text for text, _, _ in found))
    ]


def segments(
    messages: list[dict], tokenizer: Tokenizer, place: str
) -> Iterator[tuple[str, bool, bool]]:
    """(text, whether it counts, whether the end of a document follows), in order."""
    if tokenizer.render is None:
        for message in messages:
            is_answer = message["role"] == "assistant"
            yield f"{message['role']}: ", False, False
            yield message["content"], is_answer, True
        return
    try:
        whole, done = tokenizer.render(messages, False), 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = tokenizer.render(messages[:i], True)
                end = tokenizer.render(messages[: i + 1], False).rstrip()
                if not whole.startswith(end):  # Qwen3's drops the thoughts of old answers
                    raise ValueError(
                        "it changes an answer that messages follow: cut the chat into chats that "
                        "end with their only answer"
                    )
                if not end.startswith(begin):
                    raise ValueError("an answer changes what is before it")
                yield whole[done : len(begin)], False, False
                yield whole[len(begin) : len(end)], True, False
                done = len(end)
    except Exception as error:  # of the template's code
        raise UserError(f"{place} does not fit the tokenizer's chat template: {error}") from None
    yield whole[done:], False, False
