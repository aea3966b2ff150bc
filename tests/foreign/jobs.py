"""Run a template, unchanged, on one case after another. Its ranks are forks of this process.

A fork has PyTorch, torchvision and transformers loaded, and is told what torchrun tells a rank. The
ranks of one job train many models; what happened in a training they leave in files.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from cases import SAMPLES, Case
from helpers import ROOT
from pool import environment
from records import Record
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FORK = multiprocessing.get_context("fork")
TIMEOUT = 300  # seconds for one training; the machine may be busy


@dataclass(frozen=True)
class Outcome:
    records: list[Record]  # of each rank; empty if the training failed
    error: str = ""  # the exception of the first rank that had one


class Job:
    """The ranks of one template. `start` a training, do something else, `finish` it."""

    def __init__(self, template: str, ranks: int):
        self.template, self.ranks = template, ranks
        self.processes, self.pipes = [], []

    def start(self, case: Case, epochs: int, folder: Path) -> None:
        """epochs: in all; a training that was saved in `folder` is continued."""
        self.folder, self.deadline = folder, time.monotonic() + TIMEOUT
        folder.mkdir(parents=True, exist_ok=True)
        if not self.processes:
            self.fork()
        for pipe in self.pipes:
            pipe.send((case, epochs, folder))

    def finish(self) -> Outcome:
        waiting, error = dict(zip(self.pipes, self.processes, strict=True)), ""
        while waiting and not error:
            ready = wait(waiting, max(0, self.deadline - time.monotonic()))
            error = "" if ready else f"no end within {TIMEOUT} s"
            for pipe in ready:
                try:
                    error = error or pipe.recv()
                except EOFError:
                    error = error or self.last_words(waiting[pipe])
                del waiting[pipe]
        if error:  # the other ranks may wait for the one that failed
            self.kill()
            return Outcome([], error)
        files = [self.folder / f"rank{rank}.pt" for rank in range(self.ranks)]
        return Outcome([torch.load(file, weights_only=False) for file in files])

    def last_words(self, process) -> str:
        process.join(60)
        self.log.seek(0)
        return f"a rank died, status {process.exitcode}: {self.log.read()[-3000:]}"

    def fork(self) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  what ranks print
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.ranks):
            ours, theirs = FORK.Pipe()
            told = environment(rank, self.ranks, self.store)
            process = FORK.Process(
                target=run_rank, args=(self.template, rank, told, theirs, self.log)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(60)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


# ---- in a rank


class Current:
    """The training that this process is at."""

    case: Case
    built: list  # the models that the template has made
    model: torch.nn.Module  # the one that is trained
    record: Record


def run_rank(template: str, rank: int, told: dict[str, str], pipe, log) -> None:
    # torch's first use of threads in a fork replaces the pool that it has inherited. Two threads
    # that do so at once abort: "Invalid thread pool!"
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(told, TOKENIZERS_PARALLELISM="false")  # its threads do not survive a fork
    sys.argv = ["train.py"]
    sys.path.insert(0, str(ROOT / template))
    sys.modules["task"] = make_pairs_task() if template == "t5_finetuning" else make_task()
    import config
    import runtime
    import train

    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    register_optimizer_step_pre_hook(note_gradients)
    register_optimizer_step_post_hook(note_parameters)
    with runtime.distributed_worker("cpu") as worker:
        while order := pipe.recv():
            Current.case, epochs, folder = order
            Current.built, Current.record = [], Record()
            told = Current.case.settings | {"epochs": epochs, "output_dir": folder, "log_every": 1}
            told |= {"find_unused_parameters": Current.case.finds_unused, "patience": epochs}
            known = {field.name for field in fields(config.Settings)}
            files = [write_pairs(folder)] if template == "t5_finetuning" else []
            if files:
                told |= dict(zip(("train_file", "eval_file"), files[0], strict=True))
                files += [folder]
            settings = config.Settings(**{k: v for k, v in told.items() if k in known})
            error = ""
            try:
                train.train(settings, *files, worker)
                dist.barrier()  # rank 0 has written what all ranks read now
                torch.save(complete_record(folder, epochs), folder / f"rank{rank}.pt")
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            Current.built, Current.model = [], None
            pipe.send(error)


def make_task() -> ModuleType:
    """The module that a user would write as task.py, for the current case."""

    def build_model(settings) -> torch.nn.Module:
        Current.built.append(Current.case.build())
        return Current.built[-1]

    @dataclass(frozen=True)
    class TaskSettings:
        pass

    task = ModuleType("task")
    task.TaskSettings = TaskSettings
    task.add_flags = lambda add: None
    task.download = lambda settings: None
    task.load_data = lambda settings: Current.case.data()
    task.collate = lambda samples: Current.case.collate(samples)
    task.build_model = build_model
    task.compute_loss = lambda model, batch: Current.case.loss(model, batch)
    task.units = lambda model: Current.case.units(model)
    return task


def make_pairs_task() -> ModuleType:
    """The task.py of t5_finetuning: a sample is named in a file of pairs of texts."""

    class Model:
        def __new__(cls, config) -> torch.nn.Module:
            Current.built.append(Current.case.build())
            return Current.built[-1]

        @staticmethod
        def from_pretrained(folder, **options) -> torch.nn.Module:
            model = Current.case.build()
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            return model

    def collate(pairs, tokenizer, settings):
        sets = dict(zip(("train", "test"), Current.case.data(), strict=True))
        found = [pair.text.split() for pair in pairs]  # "train 00012"
        return Current.case.collate([sets[name][int(number)] for name, number in found])

    task = ModuleType("task")
    task.MODEL, task.MODEL_TYPE, task.DROPOUT = Model, "", "dropout_rate"
    task.new_config = lambda settings, tokenizer: Current.case.build().config
    task.units = lambda model: Current.case.units(model)
    task.lr_factor = lambda name: 1.0
    task.collate = collate
    task.compute_loss = lambda model, batch: Current.case.loss(model, batch)[:2]
    task.generate_texts = lambda model, batch, *rest, **more: ["x"] * len(batch["labels"])
    return task


def write_pairs(folder: Path) -> list[Path]:
    """A file of pairs that names the training samples, and one for the test; equally long lines."""
    files = []
    for name, samples in zip(("train", "test"), Current.case.data(), strict=True):
        files.append(folder / f"{name}.jsonl")
        pairs = [{"text": f"{name} {i:05}", "summary": "a word"} for i in range(len(samples))]
        files[-1].write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return files


def note_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Before each step of any optimizer."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    models = [m for m in Current.built if stepped <= {id(p) for p in m.parameters()}]
    Current.model = models[0]
    gradients = {n: p.grad for n, p in Current.model.named_parameters() if p.grad is not None}
    Current.record.gradients.append({name: full(g) for name, g in gradients.items()})


def note_parameters(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """After the last step of an epoch."""
    if len(Current.record.gradients) == SAMPLES // Current.case.settings["batch_size"]:
        Current.record.parameters = {n: full(p) for n, p in Current.model.named_parameters()}


def complete_record(folder: Path, epochs: int) -> Record:
    record, model = Current.record, Current.model
    record.buffers = {name: full(b) for name, b in model.named_buffers()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["epoch"] == epochs - 1]
    record.losses = [line["loss"] for line in lines if "loss" in line]
    record.norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    names = {"test_loss", "eval_loss"}
    record.test_losses = [line[name] for line in lines for name in names & line.keys()]
    return record


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of it, of all its shards if it has any; all ranks call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
