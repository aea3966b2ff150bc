"""The minimal.py files differ where the idea does: they join and leave a job in the same lines."""

import runpy
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT

DIRECTORIES = ("ddp_basics", "fsdp_basics", "parallel_basics", "t5_finetuning")
DIRECTORIES += ("transformer_basics",)


def frame(text: str) -> list[str]:
    """From the environment to the end, without what is given to train()."""
    lines = text[text.index('    if "RANK" not in os.environ') :].splitlines()
    return [line.partition("train(device, rank, world_size")[0] for line in lines]


def test_all_have_one_frame():
    frames = {d: frame((ROOT / d / "minimal.py").read_text()) for d in DIRECTORIES}
    for directory in DIRECTORIES:
        assert frames[directory] == frames["ddp_basics"], directory
        assert len(frames[directory]) == 15


@pytest.mark.parametrize(
    ("directory", "says"),
    [
        ("ddp_basics", "error: 120 images do not divide over 7 ranks"),
        ("fsdp_basics", "error: 60 images do not divide over 7 ranks"),
        ("parallel_basics", "error: 480 features do not divide over 7 ranks"),
        ("t5_finetuning", "error: 6 texts are too few for 7 ranks"),
        ("transformer_basics", "error: 64 sequences do not divide over 7 ranks in pairs"),
    ],
)
def test_ranks_among_which_the_work_cannot_be_split(monkeypatch, directory, says):
    """One sentence, not another batch in silence."""
    for name, value in {"RANK": 5, "LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 7}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["minimal.py"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / directory / "minimal.py"), run_name="__main__")
    assert end.value.code == says


def test_no_gpu_is_taken_that_no_backend_knows(monkeypatch):
    """Apple's, which torch counts as an accelerator."""
    joined = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["minimal.py"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "ddp_basics/minimal.py"), run_name="__main__")
    assert joined == ["gloo"]
