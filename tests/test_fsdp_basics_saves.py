"""fsdp_basics/saves.py: which saves count, and which file of a save is broken."""

import zlib

import pytest
import torch
from arguments import UserError
from checkpoint import save_checkpoint
from runtime import Worker
from saves import checksum, newest_of, problem_of, saves

FILES = [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]


@pytest.fixture
def save(tmp_path):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(bytes([number]) * 100)
    checksums = {name: zlib.crc32((folder / name).read_bytes()) for name in FILES}
    state = {"step": 1, "run": {}, "generators": [], "checksums": checksums}
    torch.save(state, folder / "run.pt")
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FILES)
def test_each_broken_file_is_found_by_one_of_the_ranks(save, name, ranks):
    assert [problem_of(save, rank, ranks) for rank in range(ranks)] == [None] * ranks
    content = (save / name).read_bytes()
    for damage, says in ((content[:-1] + b"x", "is broken"), (None, "is missing")):
        if damage is None:
            (save / name).unlink()
        else:
            (save / name).write_bytes(damage)
        problems = [problem_of(save, rank, ranks) for rank in range(ranks)]
        assert [p for p in problems if p] == [f"{save / name} {says}"]


def test_a_checksum_is_of_the_whole_file(tmp_path):
    """Of three megabytes and a byte, which are read a megabyte at a time."""
    content = torch.arange(3 * 2**20 + 1, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(content)
    assert checksum(tmp_path / "file") == zlib.crc32(content)


def test_the_newest_whole_save_is_taken(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / f"step_{step}").mkdir()
    candidates = saves(tmp_path)
    assert [save.name for save in candidates] == ["step_2", "step_9", "step_10"]
    broken = {"step_10": "a reason"}
    save, problems = newest_of(candidates, lambda save: broken.get(save.name))
    assert (save.name, problems) == ("step_9", ["a reason"])
    with pytest.raises(UserError, match="a reason: move"):
        newest_of(candidates, lambda save: "a reason")
    assert newest_of([], lambda save: None) == (None, [])


@pytest.mark.parametrize("step", [3, 4])
def test_two_runs_in_one_folder_are_noticed(tmp_path, group, step):
    """The other run's save stays; without the check, --keep would remove this run's own saves."""
    model, worker = torch.nn.Linear(2, 2), Worker(0, 0, 1, torch.device("cpu"))
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    save_checkpoint(tmp_path, parts, step, {}, worker)
    with pytest.raises(UserError, match=rf"^another run wrote step_{step:08} to .*: choose"):
        save_checkpoint(tmp_path, parts, 3, {}, worker)
    assert [save.name for save in tmp_path.iterdir()] == [f"step_{step:08}"]
    assert problem_of(saves(tmp_path)[0]) is None
