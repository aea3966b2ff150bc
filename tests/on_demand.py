"""A dict whose values are computed when a test first asks for them: fixtures of dear jobs."""

from collections.abc import Callable


class OnDemand(dict):
    """OnDemand(compute)[key] is compute(key), computed once."""

    def __init__(self, compute: Callable):
        super().__init__()
        self.compute = compute

    def __missing__(self, key):
        self[key] = self.compute(key)
        return self[key]
