"""Count the bytes of the live tensors of a training step, by kind."""

import time

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.reductions import StorageWeakRef

KINDS = ("parameters", "optimizer", "gathered", "activations", "gradients")


class Inventory:
    """Counts the tensors of a model and its optimizer.

    parameters: the parameters that the optimizer updates; under FSDP, this rank's shards.
    optimizer: its state, on this rank.
    gathered: full parameters, while FSDP holds them in place of the shards.
    activations: the tensors that autograd keeps from forward to backward.
    gradients: also those in DDP's buckets, which outlive `.grad = None`.

    A storage counts once, for the first of these kinds that it belongs to.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.old_gradients = []  # (weak reference to a storage, its address, its bytes)
        self.activations = []

    def remember_gradients(self) -> None:
        """Call it when gradients exist: `count` then finds them even if no .grad refers to them."""
        self.old_gradients = []
        for gradient in self._gradients():
            storage = storage_of(gradient)
            entry = (StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())
            self.old_gradients.append(entry)

    def wait_until_freed(self, seconds: float = 5) -> None:
        """Wait until the remembered gradients are freed, at most this long.

        After zero_grad() they may live a moment longer: Gloo's thread lets go of the tensor of an
        all_reduce after it has woken the rank that waits for the sum.
        """
        deadline = time.monotonic() + seconds
        while any(not reference.expired() for reference, _, _ in self.old_gradients):
            if time.monotonic() > deadline:
                return  # something else holds them: count them
            time.sleep(0.001)

    def watch_activations(self):
        """A context for the forward pass that records the tensors that autograd keeps."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self.activations.append(tensor.detach())
            return self.activations[-1]

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def forget_activations(self) -> None:
        """Call it before backward, or this list would keep the activations alive."""
        self.activations.clear()

    def count(self) -> dict[str, int]:
        """Bytes now, by kind."""
        tensors = {
            "parameters": self._parameters(),
            "optimizer": self._optimizer_state(),
            "gathered": list(self.model.parameters()),
            "activations": self.activations,
            "gradients": self._gradients(),
        }
        counted, sizes = set(), {}
        for kind in KINDS:
            storages = {s.data_ptr(): s.nbytes() for s in map(storage_of, tensors[kind])}
            if kind == "gradients":
                storages |= {
                    address: size
                    for reference, address, size in self.old_gradients
                    if not reference.expired()
                }
            new = {address: size for address, size in storages.items() if address not in counted}
            sizes[kind] = sum(new.values())
            counted |= {address for address, size in new.items() if size}
        return sizes

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _optimizer_state(self) -> list[torch.Tensor]:
        optimizer = self.optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer = optimizer.optim  # the one of this rank's parameters
        return [t for entry in optimizer.state.values() for t in entry.values()]

    def _gradients(self) -> list[torch.Tensor]:
        parameters = [*self._parameters(), *self.model.parameters()]
        return [p.grad for p in parameters if p.grad is not None]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; of a DTensor, behind this rank's shard."""
    tensor = tensor.detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


def expected_activations(dim: int, depth: int, heads: int, images: int) -> int:
    """Bytes that autograd keeps from forward to backward, as PyTorch computes VisionTransformer.

    A block keeps 16 numbers for each number of its input: the input, what norm1, attention and
    norm2 return, and the sum between them (5 x 1), query, key and value (3), and both sides of GELU
    (2 x 4); two per patch and norm; one per patch and head. (Attention on a GPU may differ.)
    """
    vectors = images * 16  # 8 x 8 pixels in patches of 2 x 2
    block = 16 * vectors * dim + 4 * vectors + heads * vectors
    root = vectors * dim + 2 * vectors + images * (dim + 10 + 64) + 1  # mean, logits, the images
    return 4 * (depth * block + root) + 8 * images  # labels are int64
