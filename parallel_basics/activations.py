"""Count the bytes that autograd saves for backward (saved_tensors_hooks)."""

import weakref

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Activations:
    """Use it around forwards: `with activations.hooks():`. Call note() where the peak may be.

    Each storage counts once; the parameters of `models` do not count.
    """

    def __init__(self, *models: nn.Module):
        self.own = {p.untyped_storage().data_ptr() for m in models for p in m.parameters()}
        self.kept, self.most = weakref.WeakSet(), 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda box: box.tensor)

    def pack(self, tensor: Tensor) -> "Box":
        box = Box(tensor)  # lives as long as autograd needs the tensor
        self.kept.add(box)
        return box

    def note(self) -> None:
        storages = [box.tensor.untyped_storage() for box in self.kept]
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.own}
        self.most = max(self.most, sum(sizes.values()))


class Box:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()
