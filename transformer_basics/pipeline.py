"""Train and run a model that is split into pipeline stages, one per rank."""

import torch
import torch.distributed as dist
from config import PRECISIONS, Settings
from model import GPT, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def stage_layers(layers: int, mesh: DeviceMesh) -> range:
    """The blocks of this rank's stage. If they do not divide, the first stages have one more.

    mesh: its one axis has the ranks of one pipeline, in order.
    """
    stage, stage_count = mesh.get_local_rank(), mesh.size()
    at_least, one_more = divmod(layers, stage_count)
    first = stage * at_least + min(stage, one_more)
    return range(first, first + at_least + (stage < one_more))


def second_copy(model: GPT) -> nn.Parameter | None:
    """The last stage's copy of a tied weight; None on other stages, and if nothing is tied."""
    is_copy = model.config.tied and model.is_last and not model.is_first
    return model.token_embedding.weight if is_copy else None


class Pipeline:
    """model: this rank's stage. mesh: its one axis has the ranks of one pipeline, in order.

    A batch passes through the stages in --accumulate micro-batches: at least one per stage.
    """

    def __init__(self, model: GPT, mesh: DeviceMesh, settings: Settings, device: torch.device):
        self.model, self.device = model, device
        self.dtype = PRECISIONS[settings.precision]  # of the hidden states that a stage sends
        # The number of shards of the tokens between blocks.
        self.sequence_parts = settings.tp if settings.sequence_parallel else 1
        self.group, self.stage, self.stages = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        stage = PipelineStage(model, self.stage, self.stages, device, group=self.group)
        # Divide gradients by the number of micro-batches: the mean over the batch.
        # In chunks, the last stage itself computes the loss, which never has all logits at once.
        self.in_chunks = model.is_last and settings.loss_chunks > 1
        loss = (lambda loss, targets: loss) if self.in_chunks else cross_entropy
        self.schedule = Schedule1F1B(stage, settings.accumulate, loss, scale_grads=True)

    def train(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on the last stage, 0 elsewhere.

        Every rank passes the full batch: the first stage uses the inputs, the last the targets.
        """
        losses = []
        if self.model.is_first:
            # Up to torch 2.11 a stage refuses a view of another tensor, such as [:, :-1].
            self.schedule.step(x_BT.contiguous(), return_outputs=False)
        elif self.model.is_last:
            y_BT = y_BT.contiguous()
            more = {"targets_BT": y_BT} if self.in_chunks else {}
            self.schedule.step(target=y_BT, losses=losses, return_outputs=False, **more)
        else:
            self.schedule.step()
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
        peer = self.stages - 1 if self.model.is_first else 0
        own = self.model.token_embedding.weight.grad.to_local()
        other = torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own += other  # a + b here, b + a there: the same bits

    @torch.no_grad()
    def forward(self, x_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor | None:
        """The logits on the last stage, None on other stages: one rank computes at a time.

        With targets, the last stage returns the mean loss.
        """
        hidden = x_BT
        if not self.model.is_first:
            tokens = x_BT.shape[1] // self.sequence_parts
            shape = (x_BT.shape[0], tokens, self.model.config.dim)
            hidden = torch.empty(shape, device=self.device, dtype=self.dtype)
            dist.recv(hidden, group=self.group, group_src=self.stage - 1)
        out = self.model(hidden, targets_BT)
        if self.model.is_last:
            return out
        dist.send(out.contiguous(), group=self.group, group_dst=self.stage + 1)
        return None

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Send the last stage's `tensor` to all stages; returns it."""
        dist.broadcast(tensor, group=self.group, group_src=self.stages - 1)
        return tensor
