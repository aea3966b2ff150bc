"""Train and run a model that is split into pipeline stages, one or several per rank."""

import torch
import torch.distributed as dist
from config import PRECISIONS, Settings
from model import GPT, cross_entropy
from stages import StagesOfRank
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Pipeline:
    """model: this rank's stage, or its stages as one module. mesh: the ranks of one pipeline.

    Stage i of all stages is on rank i mod p. A batch passes through the stages in --accumulate
    micro-batches, at least one per rank, in the order of --schedule.
    """

    def __init__(
        self, model: GPT | StagesOfRank, mesh: DeviceMesh, settings: Settings, device: torch.device
    ):
        self.model, self.device = model, device
        self.dtype = PRECISIONS[settings.precision]  # of the hidden states that a stage sends
        # The number of shards of the tokens between blocks.
        self.sequence_parts = settings.tp if settings.sequence_parallel else 1
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.parts = model.stages if settings.local_stages > 1 else (model,)
        stages = [
            PipelineStage(part, number, self.ranks * len(self.parts), device, group=self.group)
            for number, part in zip(numbers_of(settings, self.rank), self.parts, strict=True)
        ]
        # In chunks, the last stage itself computes the loss, which never has all logits at once.
        self.in_chunks = model.is_last and settings.loss_chunks > 1
        self.microbatches = settings.accumulate
        self.cross_entropy = cross_entropy  # train_step sets a compiled one
        # scale_grads divides gradients by the number of micro-batches: the mean over the batch.
        self.schedule = SCHEDULES[settings.schedule](
            stages if settings.schedule != "1f1b" else stages[0],
            settings.accumulate,
            self.loss_of,
            scale_grads=True,
        )

    def train(
        self,
        x_BT: Tensor,
        y_BT: Tensor,
        tokens: Tensor | int,
        starts_BT: Tensor | None = None,
        keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on the last stage, 0 elsewhere.

        Every rank passes the full batch: the first stage uses the inputs, the last the targets, and
        each stage the starts of the documents and the keys of dropout, if any.
        tokens: what the sum of losses is divided by.
        """
        losses, self.tokens = [], tokens
        # The schedule divides these into micro-batches, too.
        per_token = {"starts_BT": starts_BT, "keys_BT": keys_BT}
        per_token = {name: value for name, value in per_token.items() if value is not None}
        if self.model.is_first:
            # Up to torch 2.11 a stage refuses a view of another tensor, such as [:, :-1].
            self.schedule.step(x_BT.contiguous(), return_outputs=False, **per_token)
        elif self.model.is_last:
            y_BT = y_BT.contiguous()
            per_token |= {"targets_BT": y_BT} if self.in_chunks else {}
            self.schedule.step(target=y_BT, losses=losses, return_outputs=False, **per_token)
        else:
            self.schedule.step(**per_token)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).mean()

    def add_tied_gradients(self) -> None:
        """Give both copies of a tied weight the sum of both gradients; all ranks call this.

        The embedding on the first stage and the head on the last have copies of one weight, and
        each copy has the gradient of its own use. They start equal (both are drawn or read under
        the embedding's name), so equal gradients keep them equal. Ranks with the same coordinates
        on the other axes exchange their shards.
        """
        if not (self.model.config.tied and (self.model.is_first or self.model.is_last)):
            return
        if not self.model.token_embedding.weight.requires_grad:
            return
        peer = self.ranks - 1 if self.model.is_first else 0
        own = self.model.token_embedding.weight.grad.to_local()
        other = torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own += other  # a + b here, b + a there: the same bits

    def loss_of(self, out: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss of a micro-batch: the mean over micro-batches is the loss of the batch."""
        if self.in_chunks:
            loss_sum = out * targets_BT.numel()
        else:
            loss_sum = self.cross_entropy(out, targets_BT, "sum")
        return loss_sum * self.microbatches / self.tokens

    @torch.no_grad()
    def forward(
        self, x_BT: Tensor, targets_BT: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> Tensor | None:
        """The logits on the last stage, None on other stages: one rank computes at a time.

        With targets, the last stage returns the mean loss.
        """
        for part in self.parts:
            hidden = x_BT
            if not part.is_first:
                tokens = x_BT.shape[1] // self.sequence_parts
                shape = (x_BT.shape[0], tokens, part.config.dim)
                hidden = torch.empty(shape, device=self.device, dtype=self.dtype)
                dist.recv(hidden, group=self.group, group_src=(self.rank - 1) % self.ranks)
            out = part(hidden, targets_BT, starts_BT)
            if part.is_last:
                return out
            dist.send(out.contiguous(), group=self.group, group_dst=(self.rank + 1) % self.ranks)
        return None

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Send the last stage's `tensor` to all stages; returns it."""
        dist.broadcast(tensor, group=self.group, group_src=self.ranks - 1)
        return tensor


def numbers_of(settings: Settings, rank: int) -> list[int]:
    """The numbers of the stages of a rank: rank, rank + p, rank + 2 p, ..."""
    return [rank + i * settings.pp for i in range(settings.local_stages)]
