"""A model that is cut into pipeline stages, one per rank: how it is trained, and how it is used."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from model import GPT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stages:
    """model: this rank's stage. mesh: its one axis holds the ranks of one pipeline, in order.

    microbatches: parts in which a batch passes through the stages, at least as many as stages.
    loss_fn: (logits, targets) of a micro-batch -> mean loss.
    shares: parts into which sequence parallelism cuts the tokens between blocks; else 1.
    """

    def __init__(
        self,
        model: GPT,
        mesh: DeviceMesh,
        microbatches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        shares: int = 1,
    ):
        self.model, self.device, self.dtype, self.shares = model, device, dtype, shares
        self.group, self.rank, self.count = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        stage = PipelineStage(model, self.rank, self.count, device, group=self.group)
        # Gradients are divided by the number of micro-batches: the batch's mean, as without.
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn, scale_grads=True)

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on the last stage, 0 elsewhere.

        Every rank passes the whole batch: the first stage uses the inputs, the last the targets.
        """
        losses = []
        if self.model.is_first:
            self.schedule.step(x_BT)
        elif self.model.is_last:
            self.schedule.step(target=y_BT, losses=losses)
        else:
            self.schedule.step()
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).mean()

    @torch.no_grad()
    def forward(self, x_BT: Tensor) -> Tensor | None:
        """The logits on the last stage, None elsewhere: one rank computes, the others wait."""
        hidden = x_BT
        if not self.model.is_first:
            shape = (x_BT.shape[0], x_BT.shape[1] // self.shares, self.model.config.dim)
            hidden = torch.empty(shape, device=self.device, dtype=self.dtype)
            dist.recv(hidden, group=self.group, group_src=self.rank - 1)
        out = self.model(hidden)
        if self.model.is_last:
            return out
        dist.send(out.contiguous(), group=self.group, group_dst=self.rank + 1)
        return None

    def from_last(self, tensor: Tensor) -> Tensor:
        """The last stage's `tensor`, on all stages."""
        dist.broadcast(tensor, group=self.group, group_src=self.count - 1)
        return tensor
