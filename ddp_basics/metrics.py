"""Log a run on rank 0: printed lines, JSON lines to plot, TensorBoard if asked for."""

import errno
import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from arguments import DiskError, UserError, disk_error
from runtime import Worker


class Metrics:
    """`log` prints a line and appends a JSON object to OUTPUT_DIR/metrics.jsonl.

    step: the step from which the run continues. Lines of later steps are dropped from the file,
        because the run repeats these steps. Numbers that it has already are not added again.
    total_steps: the length of the run, for the printed line.
    tensorboard: also write OUTPUT_DIR/tensorboard. Call another tracker in `log`, and give it the
        same run id after a restart.
    Raises `UserError` if metrics.jsonl is not a file of this script.
    """

    def __init__(
        self,
        output_dir: Path | None,
        step: int,
        total_steps: int,
        worker: Worker,
        tensorboard: bool = False,
    ):
        self.total_steps, self.worker = total_steps, worker
        self.file = self.board = None
        if output_dir is None or not worker.is_main:
            return
        path = output_dir / "metrics.jsonl"
        try:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]  # the last may be cut by a kill
            parsed = {line: json.loads(line) for line in whole}
            kept = {line: values for line, values in parsed.items() if values["step"] <= step}
        except (ValueError, KeyError, TypeError, IsADirectoryError):
            raise UserError(f"{path} is not a file of this script: move it away") from None
        except OSError as error:
            raise DiskError(f"cannot read {path}: {error.strerror}") from None
        try:
            if len(kept) < len(lines):
                temporary = path.with_name("metrics.jsonl.tmp")  # a full disk leaves the old file
                temporary.write_text("".join(kept))
                os.replace(temporary, path)
            self.file = path.open("a", buffering=1)
        except OSError as error:
            raise disk_error(f"cannot write {path}", error) from None
        self.kept = {(line["step"], *line) for line in kept.values()}  # step and names
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(output_dir / "tensorboard", purge_step=step + 1)

    def log(self, step: int, epoch: int, **values: float) -> None:
        """Log values by name, as in loss=0.3 or samples_per_second=5000."""
        if not self.worker.is_main:
            return
        words = [f"{readable(name)} {number(value)}" for name, value in values.items()]
        width = len(str(self.total_steps))
        try:
            print(f"step {step:{width}}/{self.total_steps}   epoch {epoch}   " + "   ".join(words))
            sys.stdout.flush()  # a log file gets the line at once, too
        except OSError as error:
            # A closed terminal, or Ctrl-C has ended what reads us (| tee log): we must still save.
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
        line = {"step": step, "epoch": epoch, **values}
        if self.file and (step, *line) not in self.kept:
            try:
                self.file.write(json.dumps(line) + "\n")
            except OSError as error:
                raise DiskError(f"cannot write {self.file.name}: {error.strerror}") from None
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        for writer in (self.file, self.board):
            if writer:
                writer.close()


def readable(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_mb", " MB").replace("_", " ")


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Throughput:
    """Steps per second, without the time between stop() and start(): evaluation, saving.

    On a GPU call stop() after reading a number from it: only then have its steps ended.
    """

    def __init__(self, step: int):
        self.steps, self.seconds = 0, 0.0  # of all intervals
        self.start(step)

    def start(self, step: int) -> None:
        self.first_step, self.started = step, time.perf_counter()

    def stop(self, step: int) -> float:
        """The steps per second since start()."""
        steps, seconds = step - self.first_step, time.perf_counter() - self.started
        self.steps += steps
        self.seconds += seconds
        return steps / seconds

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.steps else 0.0


def check_finite(
    step: int, loss: float, grad_norm: float, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Raise `UserError` if the loss or the gradient norm is infinite or NaN.

    scaler: in fp16 some gradients overflow: the scaler skips the step and halves its scale, which
        begins at 65536. If gradients overflow although it scales the loss down, that is an error.
    """
    may_skip = scaler is not None and scaler.is_enabled() and scaler.get_scale() >= 1
    if not math.isfinite(loss) or not (math.isfinite(grad_norm) or may_skip):
        raise UserError(
            f"step {step}: the loss is {loss}, the gradient norm {grad_norm}: try a smaller --lr, "
            "a longer --warmup or a smaller --clip, in another --output-dir"
        )


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory in MB, by name for `Metrics.log`: of tensors, and as reserved by torch.

    On a CPU: the peak resident memory (RSS) of this process.
    """
    if device.type != "cpu":
        allocated = torch.accelerator.max_memory_allocated(device)
        reserved = torch.accelerator.max_memory_reserved(device)
        return {"memory_mb": allocated / 1e6, "reserved_mb": reserved / 1e6}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6}


def make_profiler(
    settings, first_step: int, total_steps: int, worker: Worker
) -> AbstractContextManager:
    """A profiler of the 10th to 12th step from here; its file opens in Perfetto (ui.perfetto.dev).

    Inside the `with` block call its step() after each step. Without --profile the block gets None,
    also if a continued run has fewer than 12 steps left.
    settings: of the script, with `profile` and `output_dir`.
    Raises `UserError` if the whole run, `total_steps`, has fewer than 12.
    """
    if not settings.profile:
        return nullcontext()
    if total_steps < 12:
        raise UserError(f"--profile traces steps 10 to 12, and the run has {total_steps}")
    left = total_steps - first_step
    if left < 12:
        if worker.is_main:
            print(f"--profile: no trace, since it needs 12 steps, and {left} are left", flush=True)
        return nullcontext()

    def write(profiler) -> None:
        profiler.export_chrome_trace(str(settings.output_dir / f"trace_{worker.rank}.json"))

    when = torch.profiler.schedule(skip_first=8, wait=0, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=when, on_trace_ready=write)
