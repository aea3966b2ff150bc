"""fsdp_basics/saves.py: which saves count, and which file of a save is broken."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from arguments import UserError
from checkpoint import resume, save_checkpoint, start_save, together
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


def alone() -> Worker:
    return Worker(0, 0, 1, torch.device("cpu"))


def test_a_part_that_no_run_could_load_again_is_refused(tmp_path, group):
    """torch.save writes a scalar of NumPy, and torch.load(weights_only=True) refuses it."""
    best = SimpleNamespace(state_dict=lambda: {"loss": np.float64(0.5)})
    parts = {"model": torch.nn.Linear(2, 2), "best": best}
    with pytest.raises(UserError, match=r"^cannot save: no run could .* \(.*numpy.*scalar"):
        save_checkpoint(tmp_path, parts, 1, {}, alone())
    assert saves(tmp_path) == []


@pytest.mark.parametrize("new", ["optimizer_1", "ema"])
def test_a_part_that_the_save_lacks_is_named(tmp_path, group, new):
    model = torch.nn.Linear(2, 2)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    save_checkpoint(tmp_path, parts, 1, {}, alone())
    other = torch.optim.AdamW(model.parameters()) if new == "optimizer_1" else torch.nn.ReLU()
    with pytest.raises(UserError, match=rf"step_00000001 has no part '{new}': choose another"):
        resume(tmp_path, parts | {new: other}, {}, alone())


def test_the_thread_that_saves_uses_no_gpu(tmp_path, group, monkeypatch):
    """New threads begin on GPU 0: a context there on each rank takes its memory."""

    def on_the_gpu(*args, **options):
        raise AssertionError("the thread copies through its GPU")

    loader = "torch.distributed.checkpoint.filesystem._OverlappingCpuLoader"  # no public name
    monkeypatch.setattr(loader, on_the_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parts = {"model": torch.nn.Linear(2, 2)}
    finish = start_save(tmp_path, parts, 1, {}, alone(), group=dist.new_group(backend="gloo"))
    finish()
    assert problem_of(saves(tmp_path)[0]) is None


def test_a_layer_that_the_model_no_longer_has_is_named(tmp_path, group):
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    save_checkpoint(tmp_path, {"model": two}, 1, {}, alone())
    with pytest.raises(
        UserError, match=r"does not fit this model, which has no 1\.weight: choose another --"
    ):
        resume(tmp_path, {"model": two[:1]}, {}, alone())


def growing() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(8), persistent=False)
    model.register_buffer("scale", torch.zeros(1), persistent=False)
    return model


def test_a_buffer_that_has_grown_in_forward_is_loaded(tmp_path, group):
    """Such as a cache of rotary embeddings, which is not in the state dict. In a model that was
    built on the meta device, nothing else gives it values."""
    grown, fresh = growing(), growing()
    grown.table, grown.scale = torch.ones(16), torch.ones(1)
    save_checkpoint(tmp_path, {"model": grown}, 3, {}, alone())
    assert resume(tmp_path, {"model": fresh}, {}, alone())[0] == 3
    assert torch.equal(fresh.weight, grown.weight)
    assert fresh.table.tolist() == [1.0] * 16
    assert "table" not in fresh.state_dict()
    assert fresh.scale.tolist() == [1.0]


def test_a_part_is_saved_as_it_was(tmp_path, group):
    """With --async-save training goes on before the save is complete."""
    live = SimpleNamespace(state_dict=lambda: {"seen": seen}, load_state_dict=loaded.append)
    parts = {"model": torch.nn.Linear(2, 2), "live": live}
    seen, loaded[:] = [torch.ones(1)], []
    finish = start_save(tmp_path, parts, 1, {}, alone(), group=dist.new_group(backend="gloo"))
    seen[0] += 1
    seen.append(torch.ones(1))
    finish()
    assert resume(tmp_path, parts, {}, alone())[0] == 1
    assert loaded == [{"seen": [torch.ones(1)]}]


loaded = []


def test_other_ranks_draw_new_numbers(tmp_path, group):
    """Not those of the first step again; and the same ones if the run is continued twice."""
    parts, drawn = {"model": torch.nn.Linear(2, 2)}, []
    save_checkpoint(tmp_path, parts, 3, {}, alone())
    file = tmp_path / "step_00000003/run.pt"
    state = torch.load(file)
    torch.save(state | {"generators": 2 * state["generators"]}, file)  # of two ranks
    for begin in (False, True, True):
        torch.manual_seed(7)
        if begin:
            resume(tmp_path, parts, {}, alone())
        drawn.append(torch.rand(1).item())
    assert drawn[0] != drawn[1] == drawn[2]


def test_a_save_that_cannot_be_read_is_not_given_up(save):
    """An error of the disk may be gone a moment later."""
    (save / FILES[2]).unlink()
    (save / FILES[2]).mkdir()  # reading it fails, for root too
    says = rf"{save / FILES[2]} cannot be read \(Is a directory\): start again when"
    with pytest.raises(UserError, match=says):
        newest_of([save], problem_of)
    (save / "run.pt").unlink()
    (save / "run.pt").mkdir()
    with pytest.raises(UserError, match=r"run.pt cannot be read \(Is a directory\): start again"):
        newest_of([save.with_name("step_00000000"), save], problem_of)


def test_an_error_without_a_text_is_an_error(group):
    def fails():
        raise NotImplementedError

    with pytest.raises(UserError, match="NotImplementedError"):
        together(fails)
