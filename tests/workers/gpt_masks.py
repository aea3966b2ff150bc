"""Dropout in one process, for comparison: masks from the generator SplitMix64, draw by draw."""

import torch

ALL = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


class SplitMix64:
    """Vigna's splitmix64.c, in Python's own integers."""

    def __init__(self, seed: int):
        self.state = seed & ALL

    def next(self) -> int:
        self.state = (self.state + GAMMA) & ALL
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & ALL
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & ALL
        return z ^ (z >> 31)


def output(key: int, number: int) -> int:
    """Output number 0, 1, ... of the generator of this key."""
    generator = SplitMix64(key * GAMMA)
    for _ in range(number):
        generator.next()
    return generator.next()


class Dropping:
    """A model without dropout drops, by hooks, at this step, in these rows, at these positions."""

    def __init__(self, model, rate: float, seed: int = 0):
        self.rate, self.seed, self.step, self.rows, self.positions = rate, seed, 0, [], []
        model.blocks["0"].register_forward_pre_hook(lambda block, x: (self.of(x[0], 0), *x[1:]))
        for name, block in model.blocks.items():
            for site, part in enumerate((block.attention, block.mlp)):
                places = (1 + int(name), site)
                part.register_forward_hook(lambda part, x, y, places=places: self.of(y, *places))

    def of(self, y: torch.Tensor, *places: int) -> torch.Tensor:
        if not self.rate:
            return y
        mask = [[self.kept(row, t, *places, width=y.shape[-1]) for t in self.positions]
                for row in self.rows]  # fmt: skip
        return y * torch.tensor(mask) / (1 - self.rate)

    def kept(self, row: int, position: int, *places: int, width: int) -> list[bool]:
        """Which features of one token stay."""
        key = 0
        for number in (self.seed, self.step, row, position, *places):
            key = output(key, number)
        generator = SplitMix64(key * GAMMA)
        drawn = [generator.next() for _ in range(width)]
        # Of the 64 bits as a signed number, the smallest are dropped.
        signed = [z - 2**64 if z >> 63 else z for z in drawn]
        return [z / 2**64 + 0.5 >= self.rate for z in signed]
