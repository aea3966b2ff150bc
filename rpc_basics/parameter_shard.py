"""What a parameter server holds, and how the gradients of many trainers change it.

Synchronous: an update awaits one gradient of each trainer. Asynchronous: each gradient is an
update, one at a time. Hogwild: the same, and nobody waits for anybody.
"""

import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import server_checkpoint
import torch
from compression import decompress
from torch import Tensor

MODES = ("sync", "async", "hogwild")


@dataclass(frozen=True)
class Settings:
    """Of one run; every worker gets them."""

    data: str
    mode: str
    steps: int  # of each trainer
    batch_size: int  # of all trainers together
    lr: float
    momentum: float
    pull_every: int  # gradients from the same parameters
    max_staleness: int | None
    compress: str
    seed: int
    trainers: tuple[int, ...]  # ranks
    slow: float  # seconds by which the last trainer is slower
    patience: float
    save: str | None
    save_every: int

    @property
    def updates(self) -> int:
        """A synchronous update is of one gradient of each trainer."""
        return self.steps if self.mode == "sync" else self.steps * len(self.trainers)

    def identity(self) -> dict:
        """What must be the same in a run that is continued."""
        names = ("data", "mode", "batch_size", "lr", "momentum", "seed")
        return {name: getattr(self, name) for name in names}


class Shard:
    """One part of the parameters, and what changes it. The trainers call pull and push."""

    def __init__(self, number: int, values: Tensor, settings: Settings, state: dict | None):
        self.number, self.settings = number, settings
        self.values, self.velocity = values.clone(), torch.zeros_like(values)
        self.version = 0  # updates so far
        if state:
            self.values, self.velocity = state["values"], state["velocity"]
            self.version = state["version"]
        self.trainers = set(settings.trainers)  # those whose gradients a synchronous update awaits
        self.arrived: dict[int, tuple[Tensor, int]] = {}  # sync: those of the next update
        self.means: dict[int, Tensor] = {}  # sync: the gradient of each update
        self.stalenesses, self.refused = Counter(), 0
        self.changed = threading.Condition()
        # An N-th of a step for each of N gradients: together they go as far as a synchronous one.
        self.lr = settings.lr / (1 if settings.mode == "sync" else len(settings.trainers))

    def pull(self) -> tuple[int, Tensor]:
        """The version and a copy of the values: what is returned is sent after the lock is free."""
        with self.lock():
            return self.version, self.values.clone()

    def push(self, rank: int, version: int, message: list[Tensor], samples: int) -> bool:
        """A gradient of the values of `version`, the mean over so many samples.

        False: it came too late, pull again.
        """
        settings = self.settings
        gradient = decompress(settings.compress, message, len(self.values))
        with self.lock():
            staleness = self.version - version
            limit = 0 if settings.mode == "sync" else settings.max_staleness
            if limit is not None and staleness > limit:
                self.refused += 1
                return False
            if self.version >= settings.updates:
                return False
            self.stalenesses[staleness] += 1
            if settings.mode == "sync":
                self.arrived[rank] = (gradient, samples)
                self.trainers.add(rank)  # one that was given up may come back
                self.wait_for_the_others(version)
            else:
                self.update(gradient)
        return True

    def wait_for_the_others(self, version: int) -> None:
        self.update_if_all_are_here()
        updated = lambda: self.version > version  # noqa: E731
        while not self.changed.wait_for(updated, self.settings.patience):
            for late in self.trainers - set(self.arrived):
                self.give_up(late)

    def update_if_all_are_here(self) -> None:
        if not self.arrived or not self.trainers <= set(self.arrived):
            return
        samples = sum(count for _, count in self.arrived.values())
        in_order = [self.arrived[rank] for rank in sorted(self.arrived)]  # of the ranks: same sum
        self.means[self.version] = sum(g * (count / samples) for g, count in in_order)
        self.arrived.clear()
        self.update(self.means[self.version])
        self.changed.notify_all()

    def update(self, gradient: Tensor) -> None:
        """One step of SGD with momentum, as torch.optim.SGD does it."""
        self.velocity.mul_(self.settings.momentum).add_(gradient)
        self.values.sub_(self.velocity, alpha=self.lr)
        self.version += 1
        if self.settings.save and self.version % self.settings.save_every == 0:
            self.save()

    def lock(self):
        """Hogwild: nobody waits. A gradient may be lost, or half of one be pulled."""
        return nullcontext() if self.settings.mode == "hogwild" else self.changed

    def give_up(self, rank: int) -> None:
        """Go on without this trainer: the mean is over those that are left."""
        with self.changed:
            if rank in self.trainers:
                self.trainers.remove(rank)
                print(f"server {self.number}: goes on without worker{rank}", flush=True)
                self.update_if_all_are_here()

    def save(self) -> None:
        state = {"version": self.version, "values": self.values, "velocity": self.velocity}
        state["settings"] = self.settings.identity()
        server_checkpoint.save(Path(self.settings.save), self.number, self.version, state)

    def counts(self) -> tuple[int, Counter, int]:
        """The version; how often each staleness was seen; how many gradients were refused."""
        return self.version, self.stalenesses, self.refused

    def gradients(self) -> dict[int, Tensor]:
        """By version, the mean gradient that led on from it; of synchronous updates only."""
        return self.means
