"""transformer_basics/prepare.py and its shards: what they hold, kills, broken files, and size.

The expected tokens are written out here: bytes of the documents, each with a 0 at its end.
"""

import json
import os
import random
import re
import signal
import sys
import zlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import data
import documents
import numpy as np
import prepare
import psutil
import pytest
import text_files
import torch
import torch.distributed as dist
from arguments import UserError
from data import Windows
from documents import documents_of, pieces_of
from helpers import ROOT, Job, python
from order import shuffled
from runtime import Worker
from shards import Shard, open_shards, read_index, write_json

PREPARE = ROOT / "transformer_basics/prepare.py"
KILLED = ROOT / "tests/workers/prepare_killed.py"
CORPUS_MEMORY = ROOT / "tests/workers/gpt_corpus_memory.py"


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{i}: " + "w\u00f6rd " * draw.randint(0, 30) for i in range(count)]


def json_lines(file: Path, documents: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return file


def json_chats(folder: Path, documents: list[str]) -> list[Path]:
    """Ten files."""
    files = [folder / f"chats_{i}.jsonl" for i in range(10)]
    for i, file in enumerate(files):
        question = {"role": "user", "content": f"{i}?"}
        chats = [[question, {"role": "assistant", "content": t}] for t in documents[i::10]]
        file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return files


def arguments(folder: Path, *files: Path, **changes) -> SimpleNamespace:
    options = {"field": "text", "chat": False, "tokenizer": None}
    options |= {"held_out_every": 5, "shard_mb": 0.002}
    return SimpleNamespace(folder=folder, files=files, processes=1, **(options | changes))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def prepared(tmp_path) -> Path:
    folder = tmp_path / "tokens"
    prepare.prepare(arguments(folder, json_lines(tmp_path / "a.jsonl", texts(150))))
    return folder


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(data, "check_same_text", lambda checksum, worker: None)
    monkeypatch.setattr(data, "together", lambda action: action())
    return Worker(0, 0, 1, torch.device("cpu"))


# ---- the order


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_the_order_has_each_number_once(count):
    orders = [shuffled(np.arange(count), count, *key).tolist() for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order) == list(range(count))
    if count > 100:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert orders[0] != sorted(orders[0])
    backwards = [int(shuffled(np.array([i]), count, 0, 0)[0]) for i in reversed(range(count))]
    assert backwards[::-1] == orders[0]  # a place alone says which number it has


@pytest.mark.slow
def test_the_order_is_even():
    """Over 3,000 epochs each of 10 windows comes first, and follows each other one, equally often.

    Of n draws with probability p, all counts lie within 5 standard deviations of n p.
    """
    orders = [shuffled(np.arange(10), 10, 7, epoch).tolist() for epoch in range(3000)]
    first, pairs = Counter(order[0] for order in orders), Counter()
    for order in orders:
        pairs.update(pairwise(order))
    for found, draws, kinds in ((first, 3000, 10), (pairs, 27_000, 90)):
        mean = draws / kinds
        assert len(found) == kinds
        assert all(abs(count - mean) < 5 * mean**0.5 for count in found.values())


def test_the_order_of_many_windows():
    count = 5_000_000_000
    found = shuffled(np.arange(100_000), count, 0, 0)
    assert len(np.unique(found)) == 100_000
    assert found.max() < count
    assert np.bincount((found * 10 // count).astype(int)).min() > 9500  # from all over the text


def test_windows_of_all_shards_by_hand():
    """Two windows of 3 in a shard of 8 tokens, none in one of 3, three in one of 10."""
    rows = np.arange(8), np.arange(100, 103), np.arange(200, 210)
    windows = Windows([Shard(row.astype(np.uint16), np.zeros(1, np.int64)) for row in rows], 3)
    assert windows.count == 5
    x, y = windows.read(np.array([4, 1, 2, 0, 3]))
    assert x[:, 0].tolist() == [206, 3, 200, 0, 203]
    assert torch.equal(x, x[:, :1] + torch.arange(3))
    assert torch.equal(y, x + 1)


# ---- what prepare.py writes


def test_shards_hold_the_documents(prepared):
    index = read_index(prepared)
    assert index["dtype"] == "uint16"
    found = {}
    for part in ("train", "validation"):
        found[part] = []
        for entry in index[part]:
            tokens = np.fromfile(prepared / f"{entry['name']}.bin", np.uint16)
            starts = np.fromfile(prepared / f"{entry['name']}.starts", np.int64)
            assert (len(tokens), len(starts)) == (entry["tokens"], entry["documents"])
            found[part] += [bytes(t.astype(np.uint8)) for t in np.split(tokens, starts[1:])]
    documents = [text.encode() for text in texts(150)]
    held_out = [text for text in documents if zlib.crc32(text) % 5 == 0]
    assert found["validation"] == [text + b"\0" for text in held_out]
    assert found["train"] == [text + b"\0" for text in documents if text not in held_out]
    assert len(index["train"]) > 3
    assert not [name for name in content(prepared) if "piece" in name or "tmp" in name]


@pytest.mark.parametrize("most", [1, 7, 100, 1000, 10**6])
def test_every_line_is_in_one_piece(tmp_path, most):
    documents = ["x" * n for n in (1, 30, 2, 300, 0, 5, 88, 89, 90, 1000)]
    file = json_lines(tmp_path / "a.jsonl", documents)
    pieces = pieces_of([file], most)
    assert len(pieces) == -(-file.stat().st_size // most)
    found = [text.decode() for piece in pieces for p in piece for text in documents_of(p, "text")]
    assert found == [text for text in documents if text]


def test_text_files_are_documents(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(10)]
    for n, file in enumerate(files):
        file.write_bytes(b"x" * n)
    files.insert(4, json_lines(tmp_path / "a.jsonl", ["between"]))  # 20 bytes
    pieces = pieces_of(files, 12)
    kinds = ["".join(part.kind[0] for part in piece) for piece in pieces]
    assert kinds == ["ttttj", "jt", "ttt", "tt"]  # 0+1+2+3+12, 8+4, 5+6+7, 8+9 bytes
    found = [len(text) for piece in pieces for p in piece for text in documents_of(p, "text")]
    assert found == [1, 2, 3, len("between"), 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("most", [100, 1000, 10**6])
def test_a_long_text_file_is_many_documents(tmp_path, monkeypatch, most):
    """As one document it could not be divided into text for training and held-out text."""
    monkeypatch.setattr(documents, "LONGEST", 500)
    monkeypatch.setattr(documents, "MEGABYTE", 60)
    short, file = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_bytes(b"x" * 500)
    lines = [f"line {n} {'y' * (7 * n % 50)}\n".encode() for n in range(200)]
    file.write_bytes(b"".join(lines) + b"without an end")
    parts = [part for piece in pieces_of([file, short], most) for part in piece]
    found = [text for part in parts for text in documents_of(part, "")]
    assert found.pop() == b"x" * 500
    assert b"".join(found) == file.read_bytes()
    assert all(text.endswith(b"\n") for text in found[:-1])
    assert max(map(len, found)) < 60 + max(map(len, lines))
    assert len(found) > 80
    prepare.prepare(arguments(tmp_path / "tokens", file))
    index = read_index(tmp_path / "tokens")
    assert all(index[part][0]["documents"] for part in ("train", "validation"))


def test_short_row_groups_and_files_share_a_shard(tmp_path):
    """A window lies in one shard: of many short shards much text would be in none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": texts(60)}), tmp_path / "a.parquet", row_group_size=3
    )
    lines = [json_lines(tmp_path / f"{i}.jsonl", texts(9, seed=i)) for i in range(20)]
    folder = tmp_path / "tokens"
    prepare.prepare(arguments(folder, tmp_path / "a.parquet", *lines, shard_mb=1))
    index = read_index(folder)
    assert [len(index[part]) for part in ("train", "validation")] == [1, 1]
    assert sum(index[part][0]["documents"] for part in ("train", "validation")) == 60 + 20 * 9


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", b"x", "a.jsonl.gz is compressed: unpack it first"),
        ("a.txt", "Gr\u00fc\u00dfe. ".encode("latin-1") * 99, "a.txt is no text in UTF-8"),
        ("a.txt", bytes(range(256)) * 9, "a.txt is no text in UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, one_rank, monkeypatch, name, content, says):
    """Each wrong byte would become a character of its own: U+FFFD."""
    monkeypatch.setattr(text_files, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(text_files, "once_per_node", lambda action, worker: action())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        prepare.prepare(arguments(tmp_path / "tokens", tmp_path / name))
    with pytest.raises(UserError, match=says):
        data.load_corpus([tmp_path / name], None, one_rank)
    monkeypatch.setattr(documents, "LONGEST", 5)
    if "gz" not in name:
        with pytest.raises(UserError, match=says):
            prepare.prepare(arguments(tmp_path / "others", tmp_path / name))


def test_one_strange_character_is_no_reason_to_refuse(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 5000 + b"\xff" + b"x" * 5000)
    ((part,),) = pieces_of([tmp_path / "a.txt"], 1000)
    assert [len(text) for text in documents_of(part, "")] == [10_001]


def test_json_lines_are_for_prepare(tmp_path, one_rank):
    json_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(UserError, match=r"a.jsonl is no text file: run `python prepare.py"):
        data.load_corpus([tmp_path / "a.jsonl"], None, one_rank)


def test_held_out_text_is_a_twentieth_also_of_unequal_files():
    """One of 25 files has nearly all of the text; or those that a checksum chooses have none."""
    for large in range(25):
        files = [(f"{i}.txt", b"x" * (100_000 if i == large else 100)) for i in range(25)]
        train, held_out = (sum(map(len, part)) for part in text_files.split(files))
        assert train + held_out == 102_400
        assert 0.04 < held_out / 102_400 < 0.06
    equal = [(f"{i}.txt", b"x" * 100) for i in range(40)]
    assert [len(part) for part in text_files.split(equal)] == [38, 2]


def test_a_cache_that_lost_a_file_is_written_again(tmp_path, one_rank, monkeypatch):
    monkeypatch.setattr(text_files, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(text_files, "once_per_node", lambda action, worker: action())
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    before = data.load_corpus([tmp_path / "a.txt"], None, one_rank)
    (lost,) = (tmp_path / "cache").glob("*/train_00000.starts")
    lost.unlink()
    after = data.load_corpus([tmp_path / "a.txt"], None, one_rank)
    assert np.array_equal(before.train[0].tokens, after.train[0].tokens)
    assert before.checksum == after.checksum


def test_parquet_gives_the_tokens_of_json_lines(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    documents = texts(60)
    table = pyarrow.table({"body": documents, "n": list(range(60))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    prepare.prepare(arguments(tmp_path / "rows", tmp_path / "a.parquet", field="body"))
    lines = json_lines(tmp_path / "a.jsonl", documents)
    prepare.prepare(arguments(tmp_path / "lines", lines))
    for part in ("train", "validation"):
        rows, expected = (
            np.concatenate([s.tokens for s in open_shards(folder, read_index(folder), part)])
            for folder in (tmp_path / "rows", tmp_path / "lines")
        )
        assert np.array_equal(rows, expected)
    for field, says in (("text", "no column 'text'"), ("n", "column 'n' of .* has no texts")):
        with pytest.raises(UserError, match=says):
            prepare.prepare(arguments(tmp_path / field, tmp_path / "a.parquet", field=field))
    (tmp_path / "b.parquet").write_bytes(b"text")
    with pytest.raises(UserError, match=r"b.parquet is no Parquet file"):
        prepare.prepare(arguments(tmp_path / "no", tmp_path / "b.parquet"))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="Parquet files need pyarrow: pip install pyarrow"):
        prepare.prepare(arguments(tmp_path / "no", tmp_path / "a.parquet"))


# ---- kills


@pytest.mark.parametrize("chat", [False, True])
def test_killed_and_continued_it_writes_the_same_bytes(tmp_path, capsys, chat):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    lines = [json_lines(tmp_path / "a.jsonl", texts(150))]
    lines = json_chats(tmp_path, texts(150)) if chat else lines
    prepare.prepare(arguments(whole, *lines, chat=chat))
    flags = (folder, *lines, "--held-out-every", 5, "--shard-mb", 0.002, "--processes", 1)
    for document in (37, 60):  # of each of two runs
        result = python(KILLED, document, *flags, *["--chat"] * chat)
        assert result.returncode == -signal.SIGKILL
        left = content(folder)
        assert not (folder / "index.json").exists()
        assert any("tmp" in name for name in left)  # it was in the middle of a shard
        undisturbed = content(whole)  # a shard that has its name is whole
        shards = [name for name in left if name.endswith((".bin", ".starts", ".counts"))]
        assert {Path(name).suffix for name in shards} == (
            {".bin", ".starts", ".counts"} if chat else {".bin", ".starts"}
        )
        assert all(left[name] == undisturbed[name] for name in shards)
    capsys.readouterr()
    prepare.prepare(arguments(folder, *lines, chat=chat))
    said = capsys.readouterr().out
    assert "continuing: " in said
    assert "10 of 10" not in said  # not all again
    assert content(folder) == content(whole)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    prepare.prepare(arguments(folder, *lines, chat=chat))  # nothing is left to do
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.slow
def test_processes_end_with_the_killed_one(tmp_path):
    lines = json_lines(tmp_path / "a.jsonl", texts(20_000))
    folder, alone = tmp_path / "killed", tmp_path / "alone"
    flags = (lines, "--held-out-every", 5, "--shard-mb", 0.005, "--processes", 2)
    with Job([sys.executable, PREPARE, folder, *flags]) as job:
        job.wait_until(lambda: any(folder.glob("piece_*.json")))
        children = psutil.Process(job.process.pid).children(recursive=True)
        assert len(children) >= 2
        os.kill(job.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    assert not (folder / "index.json").exists()
    said = python(PREPARE, folder, *flags, cold=True).check().output
    assert "continuing: " in said
    assert "\r" not in said  # lines, where the output is no terminal
    prepare.prepare(arguments(alone, lines, shard_mb=0.005))
    assert content(folder) == content(alone)


# ---- what is refused


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'{"text": "a"}\nno json\n', "the line from byte 14 of .* is no JSON"),
        (b'{"text": "a"}\n{"body": "b"}\n', "the line from byte 14 of .* has no text in a field"),
        (b'{"text": 3}\n', "has no text in a field 'text': --field names"),
        (
            b'[\n {"text": "a"}\n]\n',
            r"from byte 0 of .* is no JSON object.* one object per line \(jq",
        ),
        (b'[{"text": "a"}]\n', "is no JSON object: the file must have one object per line"),
        (b'{"text": "a"}\n', "of all documents none is for validation"),
    ],
)
def test_bad_lines(tmp_path, lines, message):
    (tmp_path / "a.jsonl").write_bytes(lines)
    with pytest.raises(UserError, match=message):
        prepare.prepare(arguments(tmp_path / "tokens", tmp_path / "a.jsonl"))


def test_bad_folders(prepared, tmp_path):
    with pytest.raises(UserError, match=r"was begun with other input \(held_out_every differ\)"):
        prepare.prepare(arguments(prepared, tmp_path / "a.jsonl", held_out_every=6))
    with pytest.raises(UserError, match=r"has files that prepare.py did not write"):
        prepare.prepare(arguments(tmp_path, tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="there is no file"):
        prepare.prepare(arguments(prepared, tmp_path / "nowhere"))


def truncate(folder: Path) -> None:
    os.truncate(folder / "train_00001.bin", 10)


def flip_a_bit(folder: Path, name: str = "train_00001.bin") -> None:
    changed = bytearray((folder / name).read_bytes())
    changed[11] ^= 4
    (folder / name).write_bytes(changed)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (truncate, r"train_00001.bin has 10 bytes, not [\d,]+ as index.json says: delete"),
        (lambda f: (f / "train_00002.starts").unlink(), r"train_00002.starts cannot be read"),
        (flip_a_bit, "shard train_00001 of .* is broken"),
        (lambda f: flip_a_bit(f, "validation_00001.starts"), "shard validation_00001 of .* is bro"),
        (lambda f: (f / "index.json").unlink(), r"has no index.json: prepare.py writes it last"),
        (lambda f: (f / "index.json").write_text("{"), r"index.json is no index of prepare.py"),
        (lambda f: write_json(f / "index.json", {"format": 2}), r"is no index of prepare.py"),
    ],
)
def test_broken_folders(prepared, one_rank, breakage, message):
    data.load_corpus([prepared], None, one_rank)
    prepare.verify(prepared)
    breakage(prepared)
    for look in (
        lambda: data.load_corpus([prepared], None, one_rank),
        lambda: prepare.verify(prepared),
    ):
        with pytest.raises(UserError, match=message):
            look()


def test_another_tokenizer(prepared, one_rank, tmp_path):
    name = str(word_tokenizer(tmp_path / "words", ["w\u00f6rd", "other"]))
    with pytest.raises(UserError, match=r"was prepared with --tokenizer none \(bytes\), not "):
        data.load_corpus([prepared], name, one_rank)
    folder, lines = tmp_path / "of words", tmp_path / "a.jsonl"
    prepare.prepare(arguments(folder, lines, tokenizer=name))
    with pytest.raises(UserError, match=r"not none \(bytes\): give train.py the --tokenizer"):
        data.load_corpus([folder], None, one_rank)
    corpus = data.load_corpus([folder], name, one_rank)
    first = corpus.train[0].tokens[: corpus.train[0].starts[1]]
    assert set(first[1:-1].tolist()) <= {2}  # after the number, which is unknown: one word
    assert first[-1] == 1  # the end of the document
    moved = str(word_tokenizer(tmp_path / "moved", ["w\u00f6rd", "other"]))
    assert data.load_corpus([folder], moved, one_rank).checksum == corpus.checksum
    word_tokenizer(tmp_path / "words", ["other", "w\u00f6rd"])  # the same name, other numbers
    with pytest.raises(UserError, match="as it was before it changed: prepare the text again"):
        data.load_corpus([folder], name, one_rank)


def test_a_tokenizer_that_changes_tokenises_the_text_again(group, one_rank, tmp_path, monkeypatch):
    """Its normalizer and its end decide the tokens, too, and are not in its vocabulary."""
    monkeypatch.setattr(text_files, "CACHE", tmp_path / "cache")
    worker = replace(one_rank, store=dist.HashStore())
    name, text = word_tokenizer(tmp_path / "words", ["we", "WE"]), tmp_path / "own.txt"
    text.write_text("WE we " * 100)
    tokens = data.load_corpus([text], str(name), worker).train[0].tokens
    assert tokens[:2].tolist() == [3, 2]
    file = name / "tokenizer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )
    tokens = data.load_corpus([text], str(name), worker).train[0].tokens
    assert tokens[:2].tolist() == [2, 2]
    config = name / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "[end]"', '"eos_token": "WE"'))
    assert data.load_corpus([text], str(name), worker).validation[0].tokens[-1] == 3
    config.write_text(config.read_text().replace('"eos_token": "WE"', '"eos_token": null'))
    with pytest.raises(UserError, match="has no end token: set eos_token in its tokenizer_config"):
        data.load_corpus([text], str(name), worker)


def word_tokenizer(folder: Path, words: list[str]) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[?]", "[end]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[?]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[?]", eos_token="[end]")
    fast.save_pretrained(folder)
    prepare.tokenizer_of_process.cache_clear()
    return folder


# ---- size


def sparse(folder: Path, shards: int, tokens: int) -> Path:
    """Shards of zeros, each one document, which take no room on the disk."""
    folder.mkdir()
    entry, entries = {"tokens": tokens, "documents": 1, "crc32": 0}, []
    for number in range(shards):
        entries.append({"name": f"train_{number:05}", **entry})
        (folder / f"train_{number:05}.starts").write_bytes(bytes(8))
        (folder / f"train_{number:05}.bin").touch()
        os.truncate(folder / f"train_{number:05}.bin", 2 * tokens)
    index = {"format": 1, "tokenizer": None, "vocabulary": "bytes", "token_count": 256}
    index |= {"dtype": "uint16", "train": entries, "validation": []}
    write_json(folder / "index.json", index)
    return folder


def test_more_shards_than_files_may_be_open(tmp_path):
    """Each mapped file keeps a descriptor: the soft limit is raised to the hard one."""
    folder, reader = sparse(tmp_path / "tokens", 100, 10), tmp_path / "reader.py"
    reader.write_text(
        "import resource, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(PREPARE.parent)!r})\n"
        "from shards import UserError, open_shards, read_index\n"
        f"folder = Path({str(folder)!r})\n"
        "for hard in (1000, 100):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "    try:\n"
        "        print(open_shards(folder, read_index(folder), 'train')[-1].tokens.tolist())\n"
        "    except UserError as error:\n"
        "        print(error)\n"
    )
    opened, refused = python(reader).check().output.splitlines()
    assert opened == str([0] * 10)
    assert re.search(
        r"000\d\d.* cannot be opened: the limit .* is 100, .* with `ulimit -n`", refused
    )
    assert "prepare the text again" not in refused


def test_20_billion_tokens_start_as_20_million(tmp_path):
    """Neither memory nor the processor's time grows: 200 shards of 100 M tokens, 40 GB."""
    folders = [sparse(tmp_path / "few", 2, 10_000_000), sparse(tmp_path / "many", 200, 100_000_000)]
    _, *lines = python(CORPUS_MEMORY, *folders).check().output.splitlines()
    (few, small, _), (many, large, grown) = map(json.loads, lines)
    assert many > 990 * few
    assert large < small + 1e6
    assert grown < 20e6
