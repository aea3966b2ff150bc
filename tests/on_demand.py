"""A dict whose values are computed when a test first asks for them: fixtures of dear jobs."""

from collections.abc import Callable


class OnDemand(dict):
    """OnDemand(compute)[key] is compute(key), computed once, also if it fails."""

    def __init__(self, compute: Callable):
        super().__init__()
        self.compute = compute
        self.failed = {}  # key -> the first line of why

    def __missing__(self, key):
        if key in self.failed:
            why = f"the job of {key!r} has failed: see the first test that asked for it"
            raise AssertionError(f"{why} ({self.failed[key]})")
        try:
            self[key] = self.compute(key)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also pytest's own, of a time limit
            self.failed[key] = str(error).partition("\n")[0]
            raise
        return self[key]
