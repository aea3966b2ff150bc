"""Gather sharded tensors, and compare them with expected ones."""

from torch import Tensor

KINDS = ("loss", "gradient", "parameter")


def full_tensor(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; all ranks call this, because a DTensor must be gathered."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def largest_differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    """The largest difference of each kind in KINDS: loss, gradients, parameters.

    The names of the tensors begin with their kind: "loss", "gradient head.weight", and so on.
    Raises RuntimeError if not all names are in both.
    """
    if actual.keys() != expected.keys():
        raise RuntimeError(f"not the same tensors: {actual.keys() ^ expected.keys()}")
    largest = dict.fromkeys(KINDS, 0.0)
    for name, tensor in actual.items():
        kind = name.split()[0]
        difference = (tensor - expected[name]).abs().max().item()
        largest[kind] = max(largest[kind], difference)
    return list(largest.values())
