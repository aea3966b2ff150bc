"""Counts the collectives of a step: in which phase, at which layer, how many bytes.

    with CountCollectives(model) as count:
        loss = model(x).mean()
        count.begin("backward")
        loss.backward()
    calls, nbytes = count.total("backward", "mlp")

It sees what DTensor calls as well as dist.all_reduce() and the like.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from model import GPT
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # sees the collectives of C++ code too

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class CountCollectives(TorchDispatchMode):
    """calls, nbytes: (phase, layer, operation) -> calls of this rank, bytes of the whole tensors.

    phase: what begin() was told last; at first "forward".
    layer: such as "blocks.0.attention"; "outside", for instance in the loss.
    The whole tensor is what an all_gather returns, what a reduce_scatter or an all_reduce is given.
    """

    def __init__(self, model: GPT):
        super().__init__()
        self.calls, self.nbytes = Counter(), Counter()
        self.model, self.hooks = model, []
        self.begin("forward")

    def begin(self, phase: str) -> None:
        self.phase, self.layer = phase, "outside"

    def __enter__(self):
        for name, layer in layers_of(self.model):
            # Around all hooks that the layer has already: those communicate, too.
            before, after = self.around(name)
            self.hooks.append(layer.register_forward_pre_hook(before, prepend=True))
            self.hooks.append(layer.register_forward_hook(after))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self.hooks:
            hook.remove()

    def around(self, name: str):
        def at_layer(*_) -> None:
            self.layer = name

        def after(module, inputs, output) -> None:
            self.layer = "outside"
            if output.requires_grad:
                output.register_hook(at_layer)  # its gradient is there: now comes its backward

        return at_layer, after

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: then come the collectives that it needs
        result = function(*args, **(kwargs or {}))
        if operation := operation_of(function):
            key = (self.phase, self.layer, operation)
            self.calls[key] += 1
            self.nbytes[key] += max(map(total_bytes, (*args[:2], result)))
        return result

    def total(self, phase: str = "", layer: str = "", operation: str = "") -> tuple[int, int]:
        """(calls, bytes) of all that fit; layer: the end of its name."""
        keys = [
            (a, b, c)
            for a, b, c in self.calls
            if phase in ("", a) and b.endswith(layer) and operation in ("", c)
        ]
        return sum(self.calls[key] for key in keys), sum(self.nbytes[key] for key in keys)

    def sent(self, ranks: int) -> int:
        """Bytes that each of `ranks` ranks sends, if all goes round in rings."""
        return round(sum(ring_bytes(key[2], n, ranks) for key, n in self.nbytes.items()))


def operation_of(function) -> str | None:
    """The collective that an operator is, or None: dist's own, and those that DTensor calls."""
    if function.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = function.overloadpacket.__name__.replace("_", "")
    return next((o for o in OPERATIONS if name.startswith(o.replace("_", ""))), None)


def layers_of(model: GPT) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) in the order of forward; no layer is in another one."""
    names = ["token_embedding", "position_embedding"] if model.is_first else []
    for i in model.blocks:
        parts = ("attention_norm", "attention", "mlp_norm", "mlp")
        names += [f"blocks.{i}.{part}" for part in parts]
    for name in names + (["norm", "head"] if model.is_last else []):
        yield name, model.get_submodule(name)


def total_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(total_bytes, tensors)) if isinstance(tensors, list | tuple) else 0


def ring_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """What each of `ranks` ranks sends if the whole tensor has `nbytes`, in a ring."""
    passes = 2 if operation == "all_reduce" else 1  # a reduce_scatter, then an all_gather
    return passes * (ranks - 1) / ranks * nbytes


def print_collectives(count: CountCollectives, formula) -> None:
    """What was counted, next to rows of (phase, kind of layer, operation, calls, bytes of each)."""
    print(f"\n{'layers':20}{'phase':11}operation      calls  formula         bytes      formula")
    expected = [0, 0]
    for phase, kind, operation, calls, each in formula:
        what = {"forward": "loss", "gradients": "norms"}[phase] if kind == "outside" else kind
        title = f"{what:20}{phase:11}{operation}"
        print_row(title, count.total(phase, kind, operation), (calls, calls * each))
        expected = [expected[0] + calls, expected[1] + calls * each]
    print_row("all", count.total(), expected)


def print_row(title: str, counted, expected) -> None:
    (calls, nbytes), (expected_calls, expected_bytes) = counted, expected
    print(f"{title:45}{calls:6}{expected_calls:9}{nbytes:14,}{expected_bytes:13,}")
