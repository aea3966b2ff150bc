"""The training that the templates promise, as one process would do it: no line is theirs.

The ranks' shares of a global batch are worked off one after the other. Gradients, norm, clipping,
schedule, weight decay and averages are written out. BatchNorm has the statistics of a share, as on
a rank; the running ones are a rank's own until the model is evaluated, and then their mean.
"""

import math

import torch
from cases import Case
from records import Record


class Oracle:
    """pairs: as t5_finetuning does it, with its own order of the data and its own schedule."""

    def __init__(self, case: Case, pairs: bool = False):
        self.case, self.pairs, self.step = case, pairs, 0
        self.train_set, self.test_set = case.data()
        torch.manual_seed(case.settings["seed"])
        self.model = case.build()
        learned = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in learned if p.dim() >= 2]
        others = [p for p in learned if p.dim() < 2]
        decay = case.settings["weight_decay"]
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if case.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=1.0)

    def epoch(self, ranks: int, epochs: int) -> Record:
        """One more epoch of a run that is planned for `epochs` of them."""
        told, record = self.case.settings, Record()
        size, pieces = told["batch_size"], told["accumulate"]
        steps_per_epoch = len(self.train_set) // size
        number = self.step // steps_per_epoch
        generator = torch.Generator().manual_seed(told["seed"] + number)
        order = torch.randperm(len(self.train_set), generator=generator)
        if self.pairs:  # all are equally long here; the batches have an order of their own
            order = order.view(-1, size)[torch.randperm(steps_per_epoch, generator=generator)]
        order = order.flatten().tolist()
        buffers = [self.copy_buffers() for _ in range(ranks)]
        for position in range(0, steps_per_epoch * size, size):
            whole, sums, count = order[position : position + size], 0.0, 0
            self.model.zero_grad()
            for rank in range(ranks):
                self.put_buffers(buffers[rank])
                share = whole[rank::ranks]
                for piece in range(pieces):
                    length = len(share) // pieces
                    part = share[piece * length : (piece + 1) * length]
                    batch = self.case.collate([self.train_set[i] for i in part])
                    loss, counted, _ = self.case.loss(self.model, batch)
                    loss.backward()
                    sums, count = sums + float(loss.detach()), count + int(counted)
                buffers[rank] = self.copy_buffers()
            record.losses.append(sums / count)
            self.update(count, steps_per_epoch * epochs, record)
        means = {}
        for name, first in buffers[0].items():
            each = [own[name] for own in buffers]
            means[name] = sum(each) / ranks if first.is_floating_point() else first
        self.put_buffers(means)
        record.test_losses.append(self.test())
        record.parameters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        record.buffers = self.copy_buffers()
        return record

    def update(self, count: int, total_steps: int, record: Record) -> None:
        """One step with the gradients of the sum over the global batch, divided by its count."""
        told = self.case.settings
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        for gradient in gradients.values():
            gradient /= count
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        record.norms.append(norm)
        if told["clip"]:
            for gradient in gradients.values():
                gradient *= min(1.0, told["clip"] / (norm + 1e-6))  # as torch: it adds 1e-6
        record.gradients.append({name: g.clone() for name, g in gradients.items()})
        warm = round(told["warmup"] * total_steps)
        if self.step < warm:
            factor = (self.step + 1) / warm
        else:
            done = (self.step - warm) / (total_steps - warm)
            factor = 1 - done if self.pairs else (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = told["lr"] * factor
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def test(self) -> float:
        """The mean loss of all test samples."""
        self.model.eval()
        loss, count, _ = self.case.loss(self.model, self.case.collate(self.test_set))
        self.model.train()
        return float(loss) / int(count)

    def copy_buffers(self) -> dict:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def put_buffers(self, values: dict) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])
