"""t5_finetuning/train.py: its pairs, equality with an unsharded T5, stopped and continued."""

import ast
import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
import train
import warm
from arguments import UserError
from data import (
    Pair,
    Sample,
    encode,
    epoch_batches,
    equal_shares,
    module,
    pairs_in,
    read_json_lines,
    split,
    train_tokenizer,
)
from evaluate import EarlyStopping, first_words, rouge
from helpers import ROOT, read_metrics
from model import from_hub, prepare
from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5ForConditionalGeneration

pytestmark = pytest.mark.slow  # importing transformers takes some seconds on each rank

SCRIPT = ROOT / "t5_finetuning/train.py"
WORDS = "open close read write file name value list tree node first last next get set find sort"


def write_pairs(path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    with open(path, "w") as file:
        for i in range(count):
            words = draw.choices(WORDS.split(), k=draw.randint(5, 20))
            text = f"def {'_'.join(words[:3])}({', '.join(words[3:])})"
            # One rank's summaries are long, the other's short.
            summary = " ".join(words[: draw.randint(1, 2) + 3 * (i % 2)]) + "."
            file.write(json.dumps({"text": text, "summary": summary}) + "\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """60 pairs to train on; 11 to judge by, which do not divide by 2."""
    folder = tmp_path_factory.mktemp("t5")
    write_pairs(folder / "train.jsonl", 60, seed=0)
    write_pairs(folder / "eval.jsonl", 11, seed=1)
    return folder


@pytest.fixture(scope="module")
def results(files):
    warm.run(ROOT / "tests/workers/t5_cases.py", files, ranks=2, timeout=240).check()
    return torch.load(files / "results.pt", weights_only=False)


# ---- two ranks against one unsharded process


def close(actual: dict, expected: dict, tolerance: float, what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        difference = (actual[name] - value).abs().max().item()
        assert difference <= tolerance, f"{what} of {name}: {difference}"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("option", ["", ", accumulate", ", clip", ", activation checkpointing"])
def test_two_ranks_equal_one_process(results, optimizer, option):
    case = results["cases"].get(optimizer + option)
    if case is None:
        pytest.skip("one optimizer for each option is enough")
    assert len(case["steps"]) == 3
    # Sums in another order: seen 1e-7 for gradients of up to 0.3. AdamW divides small gradients by
    # their own size, and so magnifies that: seen 6e-5 at a learning rate of 1e-2.
    for i, step in enumerate(case["steps"]):
        assert step["loss"] == pytest.approx(step["expected loss"], abs=5e-6)
        close(step["gradients"], step["expected gradients"], 1e-6, f"step {i}, gradient")
        tolerance = 2e-6 if optimizer == "sgd" else 5e-4
        close(step["parameters"], step["expected parameters"], tolerance, f"step {i}, value")
    assert case["eval loss"][0] == pytest.approx(case["eval loss"][1], abs=1e-4)


def test_clipping_is_by_the_norm_of_the_whole_model(results):
    for step in results["cases"]["adamw, clip"]["steps"]:
        assert step["norm"] > 0.05  # before clipping: there is something to clip
        norm = torch.nn.utils.get_total_norm(step["gradients"].values()).item()
        assert norm == pytest.approx(0.05, rel=1e-4)


def test_bf16_follows_fp32(results):
    for step in results["cases"]["sgd, bf16"]["steps"]:
        # 8 bits: 4e-3 of each number on the way; gradients of up to 0.25.
        assert step["loss"] == pytest.approx(step["expected loss"], abs=2e-2)
        close(step["gradients"], step["expected gradients"], 3e-2, "gradient")
        assert step["loss"] != step["expected loss"]  # the option does something


def test_summaries_differ_in_length(results):
    """So that a mean over ranks, instead of over tokens, would be found out."""
    for lengths in results["targets"]:
        assert sum(lengths[0::2]) < 0.8 * sum(lengths[1::2])


# ---- one matrix in four places


def test_shared_matrix_is_tied_after_sharding_and_after_training(results):
    for case in results["cases"].values():
        assert case["ties"] == [True] * 4  # once sharded, and after each of three steps
        assert "shared.weight" in case["names"]
        assert not {"lm_head.weight", "encoder.embed_tokens.weight"} & set(case["names"])


def test_gradient_of_the_shared_matrix_is_the_sum_of_its_uses(results):
    uses = results["uses"]  # encoder, decoder, output: each computed with a matrix of its own
    assert all(gradient.abs().max() > 0.01 for gradient in uses)
    gradient = results["cases"]["sgd"]["steps"][0]["gradients"]["shared.weight"]
    torch.testing.assert_close(gradient, sum(uses), atol=1e-6, rtol=0)


def test_each_rank_holds_its_share(results):
    case = results["cases"]["sgd"]
    whole = sum(p.numel() for p in case["steps"][0]["parameters"].values())
    # Odd numbers of rows leave rank 0 one more: 125 tokens x 32, and little else.
    assert whole / 2 <= case["held"] < 0.51 * whole


# ---- generation, export, resume


def test_two_ranks_generate_what_one_process_does(results):
    eleven, one = results["generated"]
    assert eleven == results["expected text"]
    assert len(set(eleven)) > 5  # not all the same, which would prove nothing
    assert one == eleven[:1]  # rank 1 had nothing to do, and did not hang


def test_export_gives_the_same_logits(results):
    export = results["export"]
    sharded, loaded = export["logits"]
    assert sharded.abs().max() > 0.1
    torch.testing.assert_close(sharded, loaded, atol=1e-6, rtol=0)
    assert export["tied"]
    assert export["architectures"] == ["T5ForConditionalGeneration"]  # not FSDPT5For...
    assert export["tokens"][0] == export["tokens"][1]


def test_local_directory_as_model(results):
    loaded, tied = results["loaded"]
    assert tied
    close(loaded, results["cases"]["adamw"]["steps"][-1]["parameters"], 0, "value")


def test_resumed_run_equals_the_straight_one(results, files):
    assert results["stop and resume"]["finished"] == [True, False, True]
    straight, stopped = files / "straight", files / "stopped"
    for name in ("metrics.jsonl", "results.json", "model/model.safetensors"):
        assert (straight / name).read_bytes() == (stopped / name).read_bytes(), name
    steps = [line["step"] for line in read_metrics(straight) if "loss" in line]
    # 60 // 12 steps in each of three epochs: none twice, none left out.
    assert steps == list(range(1, 16))


def test_best_model_is_one_of_summaries(results):
    """The first epoch, of five steps, is on names: however good, it is not what is saved."""
    exports = results["stop and resume"]["exports"]
    assert exports
    assert set(exports) <= {10, 15}


# ---- the script


def test_script(files, tmp_path):
    tiny = "--dim=32 --layers=1 --vocab-size=301 --max-source=16 --max-target=8 --epochs=2"
    data = ("--train-file", files / "train.jsonl", "--eval-file", files / "eval.jsonl")
    more = ("--batch-size", 12, "--precision", "bf16", "--output-dir", tmp_path, "--show", 2)
    result = warm.run(SCRIPT, *tiny.split(), *data, *more, timeout=240, ranks=2).check()
    assert result.output.count("2 rank(s) on cpu, gloo") == 1
    assert "Warning" not in result.output
    assert "train     60 pairs" in result.output
    results = json.loads((tmp_path / "results.json").read_text())
    pairs = read_json_lines(files / "eval.jsonl")
    assert [sample[:2] for sample in results["samples"]] == [[p.name, p.summary] for p in pairs]
    scores = rouge([sample[2] for sample in results["samples"]], [p.summary for p in pairs])
    assert results["scores"]["after training"][1:] == pytest.approx(scores)
    for name, (loss, *scores) in results["scores"].items():
        shown = ["-" if loss is None else f"{loss:.3f}", *(f"{100 * s:.1f}" for s in scores)]
        assert re.search(
            rf"^{name} +" + " +".join(map(re.escape, shown)) + "$", result.output, re.M
        )
    losses = [line["eval_loss"] for line in read_metrics(tmp_path) if "eval_loss" in line]
    assert len(losses) == 2
    assert min(losses) == results["scores"]["after training"][0]  # the best epoch's model is judged
    assert min(losses) < results["scores"]["before training"][0]
    assert result.output.count("    generated ") == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, T5ForConditionalGeneration)
    assert not list(tmp_path.glob("model.*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_model_is_reported_once(files, ranks):
    data = ("--train-file", files / "train.jsonl", "--eval-file", files / "eval.jsonl")
    result = warm.run(SCRIPT, "--model", "nobody/no-such-t5", *data, ranks=ranks)
    assert result.returncode == 2
    message = "train.py: error: --model nobody/no-such-t5: no Config to be had (OSError): "
    assert result.output.count(message) == 1
    assert result.output.splitlines()[-1].startswith(message)


def test_bad_line_ends_one_process_with_status_2(files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a", "summary": "b"}\n{"text": "a"}\n')
    result = warm.run(SCRIPT, "--train-file", bad, "--eval-file", files / "eval.jsonl")
    assert result.returncode == 2
    message = f'train.py: error: {bad} has 1 bad line(s): line 2: no "summary"'
    assert result.output.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dim", "48"], "--dim must be a multiple of 32, not 48"),
        (["--batch-size", "9", "--accumulate", "2"], "--batch-size 9 does not divide into 2 equal"),
        (["--train-file", "x.jsonl"], "--train-file and --eval-file go together: one was given"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1, not 1.0"),
        (["--max-target", "0"], "--max-target must be at least 1, not 0"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, flags, message):
    monkeypatch.setattr("sys.argv", ["train.py", *flags])
    with pytest.raises(SystemExit) as exit_:
        train.parse_args()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"train.py: error: {message}")


def test_model_that_is_no_t5(tmp_path):
    for name, config, message in (
        ("gpt2", {"model_type": "gpt2"}, r"gpt2 is of type gpt2, not t5"),
        ("other", {}, r"other: no Config to be had \(ValueError\): it must be the id of a T5"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            prepare(SimpleNamespace(model=str(tmp_path / name), dropout=0), [])
    with pytest.raises(UserError, match="no ConditionalGeneration to be had"):
        from_hub(T5ForConditionalGeneration, str(tmp_path / "gpt2"))
    for impossible in (tmp_path / "nothing", "a/b/c"):
        with pytest.raises(UserError, match="no Config to be had"):
            from_hub(AutoConfig, str(impossible))


# ---- pairs from the standard library


def test_library_gives_pairs(results):
    train, judged = ([Pair(*pair) for pair in part] for part in results["pairs"][:2])
    assert results["all ranks have the same pairs"]
    assert len(train) > 4000
    assert 200 < len(judged) < 0.12 * len(train)
    names = [pair.name for pair in (*train, *judged)]
    assert len(set(names)) > 0.95 * len(names)  # some are defined twice: once for each platform
    known = next(pair for pair in (*train, *judged) if pair.name == "bisect.py:insort_right")
    assert known.summary == "Insert item x in list a, and keep it sorted assuming a is sorted."
    assert known.text.startswith("def insort_right(a, x, lo=0, hi=None, *, key=None):\n    if key")


def test_docstring_is_not_in_the_source(results):
    repeated = []
    for text, summary, name in (*results["pairs"][0], *results["pairs"][1]):
        tree = ast.parse("if True:\n" + text if text.startswith((" ", "\t")) else text)
        function = next(
            node for node in ast.walk(tree) if hasattr(node, "args")
        )  # still a whole one
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), name
        if summary.strip(".") in text:
            repeated.append((name, summary))
    # A comment, an error message or a keyword list may hold the same words.
    assert len(repeated) < 30, repeated


def test_no_module_is_in_both_parts(results):
    train, judged = ([Pair(*pair) for pair in part] for part in results["pairs"][:2])
    assert not {module(p) for p in train} & {module(p) for p in judged}
    assert len({module(p) for p in judged}) > 10
    texts = {re.sub(r"\s+", " ", p.text) for p in train}
    assert not [p.name for p in judged if re.sub(r"\s+", " ", p.text) in texts]


def test_names_are_those_of_functions_seen(results):
    _, judged, names = ([Pair(*pair) for pair in part] for part in results["pairs"])
    assert len(names) > 5000
    assert not {module(p) for p in names} & {module(p) for p in judged}
    for text, name, where in names:
        assert text.split("\n")[0].strip().startswith(("def ", "async def ")), where
        assert name in text.split("(")[0], where
        assert text.count("\n") < 2, where
        assert len(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)) > 1, where


def test_copies_are_left_out_of_evaluation():
    body = "def parse(line, flags):\n    parts = line.split(flags)\n    return parts"
    pairs = [Pair(body, "Parse a line of text.", f"m{i}.py:parse") for i in range(200)]
    train, judged = split(pairs, part=0.1)
    assert len(train) == 180
    assert judged == []
    pairs = [Pair(f"def f{i}(): pass", "Return a number.", f"m{i}.py:f{i}") for i in range(200)]
    train, judged = split(pairs, part=0.1)
    assert (len(train), len(judged)) == (180, 20)
    assert split(pairs, part=0.1) == (train, judged)


SOURCE = '''
class A:
    @decorated
    async def first(self, x):
        """Return the first of them.

        More about it.
        """
        return x[0]

    def second(self): "Has its docstring on one line."; return 2

    def third(self,
              y): """Is mean to
    the cutter."""; return y
\f
def outer(a):
    # kept
    "Return a function, or not."  # gone
    def inner(b):
        """Add both of the numbers."""
        return a + b
    return inner

def nothing():
    """Do nothing at all here."""

def cut():
    """This sentence goes on in the
    next line."""
    return 1

def short():
    """Too short."""
    return 2

def bare(x):
    return x
'''


def test_pairs_in_a_file(tmp_path):
    (tmp_path / "x.py").write_text(SOURCE)
    found = {pair.name: pair[:2] for pair in pairs_in(tmp_path / "x.py", "x.py")}
    # Their docstrings are no whole sentence or no sentence; they have a name all the same.
    assert found.pop("x.py:cut") == ("def cut():\n    return 1", "")
    assert found.pop("x.py:short") == ("def short():\n    return 2", "")
    assert found.pop("x.py:bare") == ("def bare(x):\n    return x", "")
    assert found == {
        "x.py:A.first": (
            "    async def first(self, x):\n        return x[0]",
            "Return the first of them.",
        ),
        "x.py:outer": (
            'def outer(a):\n    # kept\n    def inner(b):\n        """Add both of the numbers."""\n'
            "        return a + b\n    return inner",
            "Return a function, or not.",
        ),
        "x.py:outer.inner": (
            "    def inner(b):\n        return a + b",
            "Add both of the numbers.",
        ),
    }
    (tmp_path / "x.py").write_text("def broken(:\n")
    assert list(pairs_in(tmp_path / "x.py", "x.py")) == []


# ---- pairs from files


def test_json_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\\nb", "summary": "c", "more": 1}\n{"summary": "d", "text": "e"}')
    assert read_json_lines(file) == [Pair("a\nb", "c", "a.jsonl:1"), Pair("e", "d", "a.jsonl:2")]


def test_bad_lines_are_named(tmp_path):
    good, file = '{"text": "a", "summary": "b"}', tmp_path / "a.jsonl"
    for bad, message in (
        ("{'text': 1}", "line 2: no JSON (Expecting property name enclosed in double quotes: line"),
        ("", "line 2: no JSON (it is blank)"),
        ("[1]", "line 2: a list, not an object"),
        ('{"text": "a"}', 'line 2: no "summary"'),
        ('{"text": " ", "summary": "b"}', 'line 2: "text" is not a text'),
        ('{"text": "a", "summary": 3}', 'line 2: "summary" is not a text'),
    ):
        file.write_text("\n".join([good, bad, good, ""]))
        with pytest.raises(UserError) as error:
            read_json_lines(file)
        assert str(error.value).startswith(f"{file} has 1 bad line(s): {message}")
    file.write_text("\n".join([good, *["x"] * 7, good]))
    with pytest.raises(UserError, match=r"7 bad line\(s\): line 2: .*line 6: .*; and 2 more$"):
        read_json_lines(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected lines of"),
        (b"\xff\xfe", "cannot be read: not UTF-8"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_useless_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_json_lines(tmp_path / "a.jsonl")


# ---- tokens, batches, scores


def test_tokenizer_cuts_names_into_words():
    texts = ["def getDefaultTimeout(): return default", "get_default_timeout", "the default. (get"]
    tokenizer = train_tokenizer(texts, 301)
    ids = [tokenizer(t)["input_ids"] for t in ("getDefaultTimeout", "get_default timeout")]
    assert ids[0] == ids[1]
    assert ids[0][-1] == tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0
    assert tokenizer("(default")["input_ids"][1:] == tokenizer("default")["input_ids"]
    text = tokenizer.decode(tokenizer("Get the default.")["input_ids"], skip_special_tokens=True)
    assert text == "get the default."
    assert train_tokenizer(texts, 301).get_vocab() == tokenizer.get_vocab()
    (sample,) = encode(tokenizer, [Pair("default " * 9, "get", "")], 4, 4, prefix="get ")
    assert sample.source == [*tokenizer("get default default")["input_ids"][:3], 1]
    assert sample.target == tokenizer("get")["input_ids"]


def test_batches_are_full_and_similar_in_length():
    draw = random.Random(0)
    samples = [Sample([0] * draw.randint(1, 100), [0]) for _ in range(1003)]
    batches = epoch_batches(samples, 8, seed=1)
    assert [len(batch) for batch in batches] == [8] * (1003 // 8)
    used = [i for batch in batches for i in batch]
    assert len(set(used)) == len(used)
    assert batches == epoch_batches(samples, 8, seed=1)
    assert batches != epoch_batches(samples, 8, seed=2)
    lengths = [[len(samples[i].source) for i in batch] for batch in batches]
    padding = sum(8 * max(batch) - sum(batch) for batch in lengths)
    assert padding < 0.1 * sum(map(sum, lengths))  # in random order: 80 %


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_shares_are_equally_many_and_complete(count):
    samples, ranks = list(range(count)), [SimpleNamespace(rank=r, world_size=3) for r in range(3)]
    batches = [equal_shares(samples, 2, worker) for worker in ranks]
    assert len({len(part) for part in batches}) == 1
    counted = [s for part in batches for batch, n in part for s in batch[:n]]
    assert sorted(counted) == samples
    assert all(batch for part in batches for batch, _ in part)


def test_rouge():
    # "size" and "of" are in both, one after the other; "the" as well, and in the same order.
    scores = rouge(["the size of it"], ["Get the file's size of"])
    # The reference has 6 words ("s" is one), the summary 4: precision 3/4, recall 3/6.
    assert scores == pytest.approx([2 * 3 / (4 + 6), 2 * 1 / (3 + 5), 2 * 3 / (4 + 6)])
    assert rouge(["a b", "c"], ["a b", "d"]) == pytest.approx([0.5, 0.5, 0.5])


def test_first_words():
    assert first_words("def get_size(self, file):\n    return 1", 5) == "def get size self file"


def test_early_stopping():
    stopping = EarlyStopping(patience=2)
    assert [stopping.improved(loss) for loss in (3, 2, 2.5)] == [True, True, False]
    other = EarlyStopping(patience=2)
    other.load_state_dict(stopping.state_dict())
    assert not other.over
    assert not other.improved(2)
    assert other.over
