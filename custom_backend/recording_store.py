"""A store that records each request, and forwards it to another store.

init_process_group accepts any dist.Store, including one written in Python. The requests that Gloo
makes in C++ arrive here too, because torch looks for the Python method of each operation.
"""

import time

import torch.distributed as dist
from sequence import Message

OPERATIONS = ("set", "get", "add", "check", "wait", "compare_set", "delete_key", "num_keys")
OPERATIONS += ("append", "multi_get", "multi_set", "has_extended_api", "set_timeout")


class RecordingStore(dist.Store):
    def __init__(self, store: dist.Store, who: str):
        super().__init__()
        self.store, self.who = store, who
        self.messages: list[Message] = []


def recorded(operation: str):
    def ask(self, *args):
        started = time.perf_counter()
        answer = getattr(self.store, operation)(*args)
        took = time.perf_counter() - started
        what = f"{operation} {in_words(operation, args, answer)}".strip()
        self.messages.append(Message(started, self.who, "store", what, took))
        return answer

    return ask


for operation in OPERATIONS:
    if hasattr(dist.Store, operation):
        setattr(RecordingStore, operation, recorded(operation))


def in_words(operation: str, args: tuple, answer) -> str:
    """ "0//cpu//0/1, 146 bytes": the keys, and the bytes that were written or read."""
    if not args:
        return ""
    keys = ", ".join(args[0]) if isinstance(args[0], list) else str(args[0])
    value = args[1] if operation == "set" else answer
    return f"{keys}, {len(value)} bytes" if isinstance(value, bytes | str) else keys
