"""Run a training script unchanged, and record what each of its steps computes, on each rank.

check.py starts it in place of the script. On SIGUSR1 it writes the stacks of its threads to
$CAPSTONE_RECORD/rank_<r>.stack. rank_<r>.pickle holds, one after another, tuples (kind, value):

    ("step", {...})     an optimizer step: name -> array, before and after; see Recorder
    ("test", x)         the points that Net got in evaluation mode, an array of shape (points, 2)
    ("save", None)      a call of torch.save
    ("raised", (time, text))    the exception that ended the script
"""

import faulthandler
import os
import pickle
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer


class Recorder:
    """Hooks for all modules and optimizers of this process.

    A step is a dict: "x" (points, 2), what Net got since the step before; "masks", one array of
    bools per call of Dropout; "dtype" of what the first linear layer returned; "buffers", and
    "before", "gradients", "after": name -> array of each parameter of Net.
    """

    def __init__(self, file, progress: list[Path], kill_at: int):
        """progress: a file for each rank, this one's first: a byte for each step.

        kill_at: the number of the step after which this process kills itself; 0: none.
        """
        self.file, self.progress, self.kill_at = file, progress, kill_at
        self.net, self.steps = None, 0
        self.inputs, self.masks, self.dtype = [], [], None
        self.step = {}
        module.register_module_forward_hook(self.after_forward, with_kwargs=True)
        optimizer.register_optimizer_step_pre_hook(self.before_step)
        optimizer.register_optimizer_step_post_hook(self.after_step)
        self.save = torch.save
        torch.save = self.note_save

    def write(self, kind: str, value=None) -> None:
        pickle.dump((kind, value), self.file)
        self.file.flush()  # a rank may be killed at any moment

    def after_forward(self, module, args, kwargs, output) -> None:
        if type(module).__name__ == "Net":
            self.net = module
            x = [*args, *kwargs.values()][0].detach().cpu().numpy().copy()
            if module.training:
                self.inputs.append(x)
            else:
                self.write("test", x)
        if isinstance(module, nn.Linear) and module.training and self.dtype is None:
            self.dtype = str(output.dtype).removeprefix("torch.")
        if isinstance(module, nn.Dropout) and module.training:
            self.masks.append((output == 0).numpy())

    def before_step(self, *_) -> None:
        if self.net is None:
            return
        self.step = {
            "x": self.inputs,
            "masks": self.masks,
            "dtype": self.dtype,
            "buffers": arrays(self.net.named_buffers()),
            "before": arrays(self.net.named_parameters()),
            "gradients": arrays((name, p.grad) for name, p in self.net.named_parameters()),
        }
        self.inputs, self.masks, self.dtype = [], [], None

    def after_step(self, *_) -> None:
        if self.net is None:
            return
        self.step["after"] = arrays(self.net.named_parameters())
        self.write("step", self.step)
        self.steps += 1
        self.progress[0].write_bytes(b"." * self.steps)
        if self.steps == self.kill_at:
            # A rank that does not wait for the other ranks may be ahead of them.
            while any(size(file) < self.steps - 1 for file in self.progress):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def note_save(self, *args, **kwargs):
        self.write("save")
        return self.save(*args, **kwargs)


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def arrays(named) -> dict:
    """name -> a copy as an array; None where a parameter has no gradient."""
    return {n: None if t is None else t.detach().float().numpy().copy() for n, t in named}


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kill_at = int(os.environ.get("CAPSTONE_KILL", 0)) if rank == world_size - 1 else 0
    record = Path(os.environ["CAPSTONE_RECORD"], f"rank_{rank}.pickle")
    with open(record, "wb") as file, open(record.with_suffix(".stack"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        ranks = [rank, *(other for other in range(world_size) if other != rank)]
        progress = [record.with_name(f"rank_{each}.steps") for each in ranks]
        recorder = Recorder(file, progress, kill_at)
        progress[0].touch()
        while not all(each.exists() for each in progress):
            time.sleep(0.01)  # a rank that is late would continue from the checkpoint of another
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                recorder.write("raised", (time.time(), text))
            raise


if __name__ == "__main__":
    main()
