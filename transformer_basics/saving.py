"""Save the checkpoints of a run, at once or (--async-save) while training goes on."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from checkpoint import start_save
from config import Settings
from runtime import Worker


class CheckpointWriter:
    """All ranks call `save`, then `finish`; from then on the save counts.

    With --async-save, `save` copies the shards of this rank into CPU memory, and a thread writes
    them. Until `finish` the folder has no new save, only one that is unfinished: a run that is
    killed before continues from the save before it. Without --async-save, `save` does both.
    """

    def __init__(self, folder: Path | None, parts: dict, settings: Settings, worker: Worker):
        self.folder, self.parts, self.keep, self.worker = folder, parts, settings.keep, worker
        # The thread needs a group of its own, or its messages would mix with the training's.
        is_async = settings.async_save and folder
        timeout = timedelta(seconds=max(settings.timeout, 1800))  # a disk may be slow
        self.group = dist.new_group(backend="gloo", timeout=timeout) if is_async else None
        self.finish_save = None

    def save(self, step: int, run: dict) -> None:
        """Raises `UserError` if it cannot be written; saves from before are then untouched."""
        self.finish()
        self.finish_save = start_save(
            self.folder, self.parts, step, run, self.worker, self.keep, self.group
        )

    def finish(self) -> None:
        """Wait until the last save, if any, is on the disk of all ranks."""
        if self.finish_save:
            self.finish_save()
        self.finish_save = None
