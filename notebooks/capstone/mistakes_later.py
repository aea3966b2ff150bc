"""Mistakes in the checkpoint, after a restart and in dropout: as mistakes.py, a sentence each."""

import pickle
from pathlib import Path

import numpy as np
import torch
from mistakes import BUFFERS, STEPS, NotYet, Run, wrong_if
from oracle import LEARNING_RATE, far


def checkpoint(run: Run, file: Path, epochs: int) -> None:
    """Has one rank written it, in the form of one_process.py, with the state after `epochs`?"""
    writers = [rank for rank in range(run.ranks) if run.of(rank, "save")]
    wrong_if(
        len(writers) > 1,
        f"ranks {' and '.join(map(str, writers))} all write checkpoint.pt, into each other's file: "
        "let rank 0 write alone",
    )
    wrong_if(not file.exists(), "no checkpoint.pt is in --folder after the first epoch")
    try:
        state = torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        state = str(error).partition("\n")[0]
    wrong_if(not isinstance(state, dict), f"checkpoint.pt cannot be read: {state}")
    missing = [key for key in ("net", "optimizer", "epochs") if not is_there(state, key)]
    wrong_if(missing, f"checkpoint.pt lacks {' and '.join(missing)}: without, no run continues")
    prefixed = [name for name in state["net"] if name.startswith("module.")]
    wrong_if(
        prefixed,
        "the names in checkpoint.pt begin with module., so one process cannot read it: save the "
        "state of Net, not that of DistributedDataParallel",
    )
    last = run.steps[STEPS * epochs - 1][0]["after"]
    saved = {name: state["net"][name].numpy() for name in last if name in state["net"]}
    wrong_if(
        set(state["net"]) != set(last) | set(BUFFERS), "checkpoint.pt has other names than Net"
    )
    wrong_if(far(saved, last), f"checkpoint.pt does not hold the weights after {epochs} epoch")
    wrong_if(
        state["epochs"] != epochs, f"checkpoint.pt says {state['epochs']} epochs, not {epochs}"
    )


def is_there(state: dict, key: str) -> bool:
    """The state of an SGD without momentum buffers is none."""
    value = state.get(key)
    return value is not None and (key != "optimizer" or bool(value.get("state")))


def resumed(run: Run, before: Run, epochs: int) -> None:
    """Does `run` continue after the first epoch of `before`, up to `epochs`?"""
    if not run.steps:
        return  # judge() says why
    saved, fresh = before.steps[STEPS - 1][0]["after"], before.steps[0][0]["before"]
    first = run.steps[0]
    lost = [rank for rank, step in enumerate(first) if far(step["before"], saved)]
    wrong_if(
        len(lost) == run.ranks and not far(first[0]["before"], fresh),
        "it begins from the start: it does not load checkpoint.pt",
    )
    if lost:
        raise NotYet(
            f"rank {lost[0]} does not begin with the saved weights: load them on all ranks"
        )
    counts = {len(run.of(rank, "step")) for rank in range(run.ranks)}
    wrong_if(
        counts == {STEPS * epochs},
        f"after epoch 1 of {epochs} it trains {epochs} epochs, not {epochs - 1}: restore the "
        "number of the epoch",
    )
    batch = {i for points in before.points[0] for i in points}  # the first of epoch 1
    again = [rank for rank, points in enumerate(run.points[0]) if set(points) <= batch]
    wrong_if(
        len(again) == run.ranks,
        "epoch 2 takes the batches of epoch 1: give set_epoch() the number of the epoch, counted "
        "over all starts",
    )
    if again:
        raise NotYet(f"rank {again[0]} begins with epoch 1 again: restore the epoch on all ranks")
    for rank, step in enumerate(first):
        moved = {name: step["after"][name] - w for name, w in step["before"].items()}
        plain = {name: -LEARNING_RATE * g for name, g in step["gradients"].items()}
        wrong_if(
            not far(moved, plain, 1e-3),
            f"rank {rank} has lost the momentum: load the optimizer's state on all ranks",
        )


def dropout_and_precision(run: Run) -> None:
    """Does each rank draw a mask of its own, and compute in bf16?"""
    for rank, step in enumerate(run.steps[0]):
        wrong_if(
            step["dtype"] != "bfloat16",
            f"rank {rank} computes in {step['dtype']} although --precision is bf16: "
            "keep the forward pass inside autocast",
        )
        wrong_if(
            not step["masks"] or not step["masks"][0].any(),
            f"rank {rank} drops nothing in training: keep the dropout, and net.train()",
        )
    masks = [np.concatenate(step["masks"]) for step in run.steps[0]]
    wrong_if(
        any(np.array_equal(mask, masks[0]) for mask in masks[1:]),
        "dropout draws the same mask on all ranks: seed each rank differently, once the weights "
        "are made",
    )
