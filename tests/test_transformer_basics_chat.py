"""transformer_basics/chat.py: the loss counts what the assistant writes, on any number of ranks."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pool
import prepare
import pytest
import torch
import torch.distributed as dist
from arguments import UserError
from chat import tokens_of_chat
from config import Settings
from data import Windows
from export import byte_tokenizer
from helpers import ROOT, python, read_metrics
from model import cross_entropy
from packing import document_starts, tokens_per_rank
from shards import PARTS, Shard, open_shards, read_index
from tokenizing import load_tokenizer

PREPARE, TRAIN = (ROOT / "transformer_basics" / name for name in ("prepare.py", "train.py"))
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}]
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}|
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def with_end(tokenizer):
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


def test_without_a_template_by_hand():
    tokens, counts = tokens_of_chat(HI, load_tokenizer(None), "here")
    assert bytes(tokens.tolist()) == b"user: Hi\0assistant: Yo!\0"
    assert tokens.dtype == np.uint16
    assert counts.tolist() == [0] * 9 + [0] * 11 + [1] * 4  # Y, o, !, end


def test_with_a_template_by_hand(tmp_path):
    theirs = with_end(byte_tokenizer())
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(tmp_path)
    chat = [{"role": "system", "content": "Be"}, *HI, {"role": "user", "content": "?"}, *HI[1:]]
    tokens, counts = tokens_of_chat(chat, load_tokenizer(str(tmp_path)), "here")
    text = b"<system>Be|\n<user>Hi|\n<assistant>Yo!|\n<user>?|\n<assistant>Yo!|\n"
    assert bytes(tokens.tolist()) == text
    first, second = text.index(b"Yo!|"), text.rindex(b"Yo!|")
    assert np.flatnonzero(counts).tolist() == [*range(first, first + 4), *range(second, second + 4)]


def test_a_template_that_has_changed_is_another_plan(tmp_path):
    """Its ids are another text, of which some pieces may be done already."""
    theirs, plans = with_end(byte_tokenizer()), []
    args = {"files": [], "tokenizer": str(tmp_path), "field": "messages", "held_out_every": 5}
    for template in (TEMPLATE, TEMPLATE + "!"):
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path)
        plans.append(prepare.plan_of(SimpleNamespace(**args, chat=True), []))
    assert [name for name in plans[0] if plans[0][name] != plans[1][name]] == ["chat_template"]


def test_a_template_that_changes_what_was_before_is_refused(tmp_path):
    theirs = with_end(byte_tokenizer())
    theirs.chat_template = "{{ messages | length }}" + TEMPLATE
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(
        UserError, match="here does not fit the tokenizer's chat template: an answer"
    ):
        tokens_of_chat(HI, tokenizer, "here")
    with pytest.raises(UserError, match="cut the chat into chats that end with their only answer"):
        tokens_of_chat([*HI, *HI], tokenizer, "here")


def shard() -> Shard:
    """Chats of 5, 3 and 5 tokens; the answers are 2 3 4, 7 and 10 12."""
    counts = np.array([0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1], np.uint8)
    return Shard(np.arange(13, dtype=np.uint16), np.array([0, 5, 8]), counts)


def test_targets_by_hand():
    x, y = Windows([shard()], 4, document_masks=True).read(np.arange(3))
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert y.tolist() == [[-101, 2, 3, 4], [-100, -101, 7, -100], [-101, 10, -101, 12]]
    starts = document_starts(y, Settings(document_masks=True))
    assert starts.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]  # prompts are no borders
    with pytest.raises(UserError, match="give --document-masks"):
        Windows([shard()], 4)


def test_the_loss_is_the_mean_over_the_answers(monkeypatch):
    _, y = Windows([shard()], 4, document_masks=True).read(np.arange(3))
    logits = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    places = [(0, 1, 2), (0, 2, 3), (0, 3, 4), (1, 2, 7), (2, 1, 10), (2, 3, 12)]
    by_hand = sum(-logits[b, t].log_softmax(-1)[target] for b, t, target in places)
    found = cross_entropy(logits, y, "sum")
    assert found.item() == pytest.approx(by_hand.item(), abs=1e-5)
    assert torch.equal(cross_entropy(logits, y.clamp(min=-1), "sum"), found)  # any negative one
    found.backward()
    learned = {(b, t) for b, t, _ in places}
    for b, t in np.ndindex(3, 4):
        assert (logits.grad[b, t] != 0).any() == ((b, t) in learned)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.add_(4))  # the other rank's
    masks = Settings(document_masks=True)
    assert tokens_per_rank(y, masks) == (6 + 4) / 2
    monkeypatch.setattr(dist, "all_reduce", lambda count: None)
    assert tokens_per_rank(torch.full((1, 4), -101), masks) == 1 / 2  # not 0: 0 / 0 is no loss


def chats(file, count: int = 120) -> None:
    """Some answers are long, most are short, so that ranks have very unequal counts."""
    draw = random.Random(0)
    lines = []
    for i in range(count):
        question = {"role": "user", "content": f"{i}? " + "why " * draw.choice([1, 12])}
        answer = {"role": "assistant", "content": "so " * draw.choice([1, 1, 1, 40])}
        lines.append(json.dumps({"messages": [question, answer] * draw.choice([1, 2])}))
    file.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    chats(folder / "a.jsonl")
    flags = ("--chat", "--held-out-every", 4, "--processes", 1)
    python(PREPARE, folder / "out", folder / "a.jsonl", *flags).check()
    python(PREPARE, folder / "out", "--verify").check()
    return folder


def test_shards_hold_what_counts(prepared):
    index, texts = read_index(prepared / "out"), []
    for part in PARTS:
        (found,) = open_shards(prepared / "out", index, part)
        assert len(found.counts) == len(found.tokens)
        answers = bytes(found.tokens[np.asarray(found.counts) == 1].tolist()).split(b"\0")[:-1]
        texts += [answer.decode() for answer in answers]
    lines = (prepared / "a.jsonl").read_text().splitlines()
    messages = [m for line in lines for m in json.loads(line)["messages"]]
    assert sorted(texts) == sorted(m["content"] for m in messages if m["role"] == "assistant")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is no JSON"),
        ('{"text": "a"}', "has no chat"),
        ('{"messages": []}', "has no chat"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "'role' is none of system, user"),
        ('{"messages": [{"role": "user"}]}', "a message without a text in 'content'"),
        ('{"messages": ["a"]}', "a message without a text in 'content'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
    ],
)
def test_a_bad_line_is_one_sentence(tmp_path, line, says):
    good = json.dumps({"messages": HI})
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    result = python(PREPARE, tmp_path / "out", tmp_path / "a.jsonl", "--chat", "--processes", 1)
    assert result.returncode == 2
    assert result.output.count("error:") == 1
    assert f"line 3 of {tmp_path / 'a.jsonl'} " in result.output
    assert says in result.output


TINY = ("--layers", 2, "--heads", 2, "--dim", 16, "--block-size", 32, "--batch-size", 8)
TINY += ("--steps", 6, "--log-every", 1, "--eval-every", 3, "--eval-batches", 2, "--sample", 4)


def losses(folder, data, *meshes) -> list[float]:
    """Losses of a run that is stopped once for each further mesh, and continued on it."""
    script = ROOT / "tests/workers/gpt_resume.py"
    for i, (ranks, flags) in enumerate(meshes):
        stop = 3 if i < len(meshes) - 1 else 0
        args = (*TINY, "--document-masks", "--output-dir", folder, "--data", data, *flags.split())
        said = pool.run(script, stop, *args, ranks=ranks).check().output
    assert i == 0 or "continuing from" in said
    lines = read_metrics(folder)
    return [value for line in lines for key, value in line.items() if key.endswith("loss")]


@pytest.mark.slow
def test_a_run_on_chats_goes_on_with_other_ranks(prepared, tmp_path):
    expected = losses(tmp_path / "one", prepared / "out", (1, ""))
    assert len(expected) == 8
    meshes = (2, "--dp-shard 2 --accumulate 2"), (2, "--tp 2")
    assert losses(tmp_path / "moved", prepared / "out", *meshes) == pytest.approx(
        expected, abs=2e-5
    )


@pytest.mark.slow
def test_a_killed_run_on_chats_goes_on_from_its_last_save(prepared, tmp_path):
    """SIGKILL in step 11, while the save of step 8 is being written: steps 5 to 12 come after."""
    args = (*TINY, "--steps", 12, "--checkpoint-every", 4, "--document-masks", "--async-save")
    args = (*args, "--log-every", 4, "--eval-every", 4)  # between these no step waits for a save
    args = (*args, "--data", prepared / "out", "--output-dir")
    pool.run(TRAIN, *args, tmp_path / "whole").check()
    script, folder = ROOT / "tests/workers/gpt_async_save.py", tmp_path / "killed"
    killed = pool.run(script, "kill", *args, folder, "--dp-shard", 2, ranks=2)
    assert killed.returncode != 0
    assert "killed in step 11" in killed.output
    assert [s.name for s in (folder / "checkpoints").glob("step*")] == ["step_00000004"]
    said = pool.run(TRAIN, *args, folder, "--tp", 2, ranks=2).check().output
    assert "step_00000004 after step 4\n" in said
    whole, continued = (read_metrics(tmp_path / name) for name in ("whole", "killed"))
    assert [line["step"] for line in continued] == [line["step"] for line in whole]
    for key in ("loss", "validation_loss"):
        expected, found = ([n[key] for n in each if key in n] for each in (whole, continued))
        assert len(expected) == 3
        assert found == pytest.approx(expected, abs=2e-5)


def test_chats_need_masks(prepared):
    result = python(TRAIN, "--data", prepared / "out")
    assert result.returncode == 2
    assert "the data are chats: give --document-masks" in result.output
