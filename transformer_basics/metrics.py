"""JSON lines, and TensorBoard if asked for, written by rank 0."""

import json
from pathlib import Path

from arguments import UserError
from runtime import Worker


class Metrics:
    """Appends one JSON object per call of `write` to OUTPUT_DIR/metrics.jsonl.

    After a restart, lines beyond `step` are dropped: those steps are done, and written, again.
    Raises `UserError` if the file there is not ours.
    """

    def __init__(
        self, output_dir: Path | None, step: int, worker: Worker, tensorboard: bool = False
    ):
        self.file = self.board = None
        if output_dir is None or not worker.is_main:
            return
        path = output_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # cut short by a kill
        try:
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a file of this script: move it away") from None
        path.write_text("".join(kept))
        self.file = path.open("a", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(output_dir / "tensorboard", purge_step=step + 1)

    def write(self, step: int, epoch: int, **values: float) -> None:
        if self.file:
            self.file.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        for writer in (self.file, self.board):
            if writer:
                writer.close()
