"""t5_finetuning/train.py: its pairs, equality with an unsharded T5, stopped and continued."""

import ast
import inspect
import json
import platform
import random
import re
import shutil
import signal
import textwrap
from types import SimpleNamespace

import config
import pool
import pytest
import torch
import train
from arguments import UserError
from data import (
    JsonLines,
    Pair,
    epoch_batches,
    make_loader,
)
from evaluate import EarlyStopping, equal_shares, first_words, rouge
from helpers import ROOT, learned, read_metrics, torchrun
from library import functions_in, library_files
from model import from_hub, prepare
from task import collate
from tokenizer import train_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

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
    """60 pairs to train on; 11 to judge by, which do not divide by 2; 40 as if of names."""
    folder = tmp_path_factory.mktemp("t5")
    write_pairs(folder / "train.jsonl", 60, seed=0)
    write_pairs(folder / "eval.jsonl", 11, seed=1)
    write_pairs(folder / "names.jsonl", 40, seed=2)
    return folder


@pytest.fixture(scope="module")
def results(files):
    pool.run(ROOT / "tests/workers/t5_cases.py", files, ranks=2, timeout=480).check()
    return torch.load(files / "results.pt", weights_only=False)


# ---- two ranks against one unsharded process


def close(actual: dict, expected: dict, tolerance: float, what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        difference = (actual[name] - value).abs().max().item()
        assert difference <= tolerance, f"{what} of {name}: {difference}"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "option",
    [
        "",
        ", accumulate",
        ", accumulate, reduce once",
        ", clip",
        ", activation checkpointing",
    ],
)
def test_two_ranks_equal_one_process(results, optimizer, option):
    case = results["cases"].get(optimizer + option)
    if case is None:
        pytest.skip("one optimizer for each option is enough")
    assert len(case["steps"]) == 3
    # Sums in another order: seen 1e-7 for gradients of up to 0.3. AdamW divides small gradients by
    # their own size, and so magnifies that: seen 1e-5 at a learning rate of 1e-3.
    for i, step in enumerate(case["steps"]):
        assert step["loss"] == pytest.approx(step["expected loss"], abs=5e-6)
        close(step["gradients"], step["expected gradients"], 1e-6, f"step {i}, gradient")
        tolerance = 2e-6 if optimizer == "sgd" else 5e-5
        close(step["parameters"], step["expected parameters"], tolerance, f"step {i}, value")
    assert case["eval loss"][0] == pytest.approx(case["eval loss"][1], abs=1e-4)


def test_each_rank_has_a_part_of_the_batch(results):
    """The numbers would be right as well if each computed everything."""
    assert [step["rows"] for step in results["cases"]["sgd"]["steps"]] == [12 / 2] * 3


def test_clipping_is_by_the_norm_of_the_whole_model(results):
    for step in results["cases"]["adamw, clip"]["steps"]:
        assert step["norm"] > 0.05  # before clipping: there is something to clip
        norm = torch.nn.utils.get_total_norm(step["gradients"].values()).item()
        assert norm == pytest.approx(0.05, rel=1e-4)


def test_norm_is_that_of_one_process(results):
    for name in ("adamw, clip", "sgd, accumulate"):
        for step in results["cases"][name]["steps"]:
            # Squares of some 1e4 numbers, summed in another order.
            assert step["norm"] == pytest.approx(step["expected norm"], rel=1e-4)


def test_bf16_follows_fp32(results):
    for step in results["cases"]["sgd, bf16"]["steps"]:
        # 8 bits: 4e-3 of each number on the way; gradients of up to 0.25.
        assert step["loss"] == pytest.approx(step["expected loss"], abs=2e-2)
        close(step["gradients"], step["expected gradients"], 3e-2, "gradient")
        # The option does something: in fp32, sums in another order differ by some 1e-6 at most.
        assert abs(step["loss"] - step["expected loss"]) > 1e-4


def test_ranks_have_different_numbers_of_tokens(results):
    """So that a mean over ranks, instead of over tokens, would be found out: by a hundredth."""
    tokens = [(sum(lengths[0::2]), sum(lengths[1::2])) for lengths in results["targets"]]
    assert all(of_rank_0 != of_rank_1 for of_rank_0, of_rank_1 in tokens[:2])


@pytest.mark.parametrize(("option", "times"), [("", 3), (", reduce once", 1)])
def test_gradients_travel_with_each_micro_batch_or_once(results, option, times):
    """Of the three micro-batches of a step. Once: they are unsharded until then."""
    case = results["cases"]["sgd, accumulate" + option]
    reduced = [step["reduce_scatters"] for step in case["steps"]]
    assert reduced == [times * len(case["units"])] * 3


def test_buffers_are_those_of_an_ordinary_model(results):
    assert torch.equal(results["buffer"], (torch.arange(1, 6) / 7).expand(2, 5))


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
    assert results["had memory"] == []  # no rank starts with the full model
    # Else everything would be gathered at once.
    assert case["units"] == ["FSDPT5Block"] * 4 + ["FSDPT5ForConditionalGeneration"]


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


def without_clocks(folder) -> list[dict]:
    lines = read_metrics(folder)
    for line in lines:
        line.pop("pairs_per_second", None)
        line.pop("memory_mb", None)
    return lines


def test_resumed_run_equals_the_straight_one(results, files):
    assert results["stop and resume"]["finished"] == [0, signal.SIGTERM, 0]
    straight, stopped = files / "straight", files / "stopped"
    for name in ("results.json", "model/model.safetensors"):
        assert (straight / name).read_bytes() == (stopped / name).read_bytes(), name
    lines = without_clocks(straight)
    assert lines == without_clocks(stopped)
    # 40 // 12 steps on names, then 60 // 12 in each of two epochs: none twice, none left out.
    steps = [(line["epoch"], line["step"]) for line in lines if "loss" in line]
    assert steps == list(zip([0] * 3 + [1] * 5 + [2] * 5, range(1, 14), strict=True))


def test_loss_and_norm_in_the_log_are_those_of_all_ranks(results, files):
    lines = [line for line in read_metrics(files / "straight") if "loss" in line]
    ranks = results["stop and resume"]["losses of ranks"]
    for losses in ranks:
        assert [line["loss"] for line in lines] == losses
    norms = results["stop and resume"]["norms"]
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-5)


def test_ranks_draw_their_own_numbers(results):
    """With equal ones, dropout would leave out the same units on all ranks."""
    assert results["stop and resume"]["seeds"] == [0, 1]


def test_best_model_is_one_of_summaries(results):
    """The first epoch, of three steps, is on names: however good, it is not what is saved."""
    exports = results["stop and resume"]["exports"]
    assert exports
    assert set(exports) <= {8, 13}


def test_nothing_is_evaluated_twice(results):
    straight, stopped, continued = results["stop and resume"]["evaluations"]
    assert straight == 1 + 3  # before training, after each epoch
    assert stopped + continued == 1 + 3  # the first one's result is in the checkpoint


def test_run_can_be_made_longer(results, files):
    finished, steps = results["stop and resume"]["made longer"]
    assert finished == [0, 0]
    assert steps == [3 + 5, 5]
    assert read_metrics(files / "longer")[-1]["epoch"] == 2


def test_what_is_no_number_ends_the_run(results):
    message = results["stop and resume"]["infinite"]
    assert re.match(
        r"step 2: the loss is \S+, the gradient norm (nan|inf): try a smaller --lr", message
    )
    assert results["stop and resume"]["infinite saved"] == 0


def test_each_group_has_its_own_learning_rate():
    """Warm-up, then linear to zero: the factor is the same for all groups, the rate is not."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.5), strict=True)]
    optimizer = torch.optim.SGD(groups)
    settings = config.Settings(lr=0.1, warmup=0.2)
    seen = []
    for step in range(10):
        shown = train.set_learning_rate(optimizer, step, 10, settings)
        seen.append((shown, *(group["lr"] for group in optimizer.param_groups)))
    factors = [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    for rates, factor in zip(seen, factors, strict=True):
        assert rates == pytest.approx((0.1 * factor, 0.1 * factor, 0.5 * factor))


def test_weight_decay_is_of_matrices():
    model = torch.nn.ModuleDict({"shared": torch.nn.Embedding(3, 2), "norm": torch.nn.LayerNorm(2)})
    optimizer = train.make_optimizer(model, config.Settings(lr=0.1, weight_decay=0.3))
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert (of[model.shared.weight]["weight_decay"], of[model.shared.weight]["lr"]) == (0.3, 0.5)
    assert (of[model.norm.weight]["weight_decay"], of[model.norm.weight]["lr"]) == (0.0, 0.1)


def test_other_run_is_not_continued(results):
    stop_and_resume = results["stop and resume"]
    assert "was trained with name_epochs = 1, not 0" in stop_and_resume["other names"]
    assert "was trained with checksum of the training file = " in stop_and_resume["other data"]


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True)])
def test_batches_are_pinned_for_a_gpu_only(monkeypatch, device, pinned):
    """With --device cpu on a machine with GPUs, pinning would take memory of the first one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = make_loader([], [[0]], list, workers=0, device=torch.device(device))
    assert loader.pin_memory == pinned


def test_another_file_on_one_host_is_named(tmp_path):
    """Of one length, and of valid lines: with it, each rank would train on its own pairs."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for folder, name in zip(hosts, ("open", "shut"), strict=True):
        folder.mkdir()
        pair = json.dumps({"text": f"def {name}(file)", "summary": f"{name} a file."})
        (folder / "pairs.jsonl").write_text(f"{pair}\n" * 30)
    flags = ("--train-file", "pairs.jsonl", "--eval-file", "pairs.jsonl")
    result = pool.run(SCRIPT, *flags, ranks=2, nodes=2, cwd=hosts)
    assert result.returncode == 2
    sentence = f"error: pairs.jsonl on {platform.node()} (rank 1) differs from the file that rank 0"
    assert sentence in result.output
    (hosts[1] / "pairs.jsonl").unlink()
    result = pool.run(SCRIPT, *flags, ranks=2, nodes=2, cwd=hosts)
    assert result.returncode == 2
    assert "(rank 1) cannot be read: No such file or directory: copy the same" in result.output


# ---- minimal.py


MINIMAL = ROOT / "t5_finetuning/minimal.py"


@pytest.fixture(scope="module")
def minimal_notes(tmp_path_factory):
    file = tmp_path_factory.mktemp("minimal") / "notes.pt"
    result = pool.run(ROOT / "tests/workers/t5_minimal.py", file, ranks=2).check()
    return torch.load(file), result.output


def plain_steps(tokenizer, model, count: int):
    """(loss, gradients, parameters) of each step of one process without torch.distributed."""
    functions = (shutil.copy, shutil.copyfile, shutil.which)
    functions += (textwrap.fill, textwrap.indent, textwrap.wrap)
    texts = [function.__name__ + str(inspect.signature(function)) for function in functions]
    summaries = [function.__doc__.strip().split("\n")[0] for function in functions]
    source, target = (tokenizer(x, padding=True, return_tensors="pt") for x in (texts, summaries))
    labels = torch.where(target.attention_mask == 1, target.input_ids, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(**source, labels=labels).loss  # the mean over all tokens
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        yield loss.item(), gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.quick
def test_minimal_equals_one_process(minimal_notes):
    notes, output = minimal_notes
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=256,
            num_heads=4,
            num_layers=2,
            decoder_start_token_id=0,
        )
    ).eval()
    losses = [float(loss) for loss in re.findall(r"^step \d+   loss (\S+)$", output, re.M)]
    assert len(losses) == len(notes["gradients"]) == 10
    for step, (loss, gradients, parameters) in enumerate(plain_steps(tokenizer, model, 10)):
        assert losses[step] == pytest.approx(loss, abs=6e-5)  # four digits are printed
        # Sums in another order: seen 2e-8 for gradients of up to 0.08, 1.2e-7 for values.
        for what, actual, expected, tolerance in (
            ("gradient", notes["gradients"][step], gradients, 1e-6),
            ("value", notes["parameters"][step], parameters, 2e-6),
        ):
            names = [name for name, _ in model.named_parameters()]
            close(
                dict(zip(names, actual, strict=True)),
                dict(zip(names, expected, strict=True)),
                tolerance,
                f"step {step}, {what}",
            )


def test_minimal_shards_each_block_then_the_root(minimal_notes):
    notes, _ = minimal_notes
    assert notes["units"] == ["T5Block"] * 4 + ["T5ForConditionalGeneration"]
    whole = sum(p.numel() for p in notes["parameters"][0])
    assert whole / 2 <= notes["held"] < 0.51 * whole


def test_minimal_gives_each_rank_a_part_of_the_batch(minimal_notes):
    """The numbers would be right as well if each computed everything."""
    assert minimal_notes[0]["rows"] == 6 / 2


def test_minimal_leaves_in_order(minimal_notes):
    """The model is gone, all ranks meet, the group ends: else a process may abort when it exits."""
    notes, _ = minimal_notes
    assert notes["end"] == [("barrier", "without a model"), ("destroy", "without a model")]


def test_minimal_runs_as_one_process(minimal_notes):
    alone = pool.run(MINIMAL).check().output
    losses = [
        re.findall(r"^step \d   loss .*", output, re.M) for output in (alone, minimal_notes[1])
    ]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


# ---- the script


def script_arguments(files, output_dir) -> tuple:
    """A short run: 3 epochs of 5 steps."""
    tiny = "--dim=32 --layers=1 --vocab-size=301 --max-source=16 --max-target=8 --epochs=3"
    data = ("--train-file", files / "train.jsonl", "--eval-file", files / "eval.jsonl")
    more = ("--batch-size", 12, "--precision", "bf16", "--show", 2, "--workers", 1)
    return (*tiny.split(), *data, *more, "--log-every", 2, "--keep", 1, "--output-dir", output_dir)


@pytest.fixture(scope="module")
def script_run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = (*script_arguments(files, folder), "--profile")
    return folder, torchrun(SCRIPT, *arguments, timeout=240).check()


def test_flags_of_the_script(script_run):
    """--keep and --profile do what they do in the other templates."""
    folder, _ = script_run
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000015"]
    for rank in (0, 1):
        events = json.loads((folder / f"trace_{rank}.json").read_text())["traceEvents"]
        steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
        assert len(steps) == 3


DIES = """
import os, runpy, signal, sys
from torch.optim import AdamW

del sys.argv[0]
moment = sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import evaluate

step, evaluation, steps = AdamW.step, evaluate.evaluate, 0


def die(at, now):
    where = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], moment
    if where == ("1", "0", now) and steps == at:
        os.kill(os.getpid(), signal.SIGKILL)


def step_or_die(*args, **more):
    global steps
    steps += 1
    die(13, "in a step")
    return step(*args, **more)


def evaluate_or_die(*args):
    die(10, "in an evaluation")
    return evaluation(*args)


AdamW.step, evaluate.evaluate = step_or_die, evaluate_or_die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "moment", ["in a step", pytest.param("in an evaluation", marks=pytest.mark.release)]
)
def test_kill_9_under_max_restarts(files, script_run, tmp_path, moment):
    """In the third epoch a rank dies, or after the second: both go on from the end of the second.

    It is saved before its evaluation, which may take longer than a scheduler waits.
    """
    (tmp_path / "dies.py").write_text(DIES)
    script = (tmp_path / "dies.py", moment, SCRIPT, *script_arguments(files, tmp_path / "run"))
    result = torchrun(*script, options=("--max-restarts=1",), timeout=300).check()
    assert result.output.count("continuing from") == 1
    assert "after step 10\n" in result.output
    straight, _ = script_run
    assert learned(tmp_path / "run") == learned(straight)
    folders = (tmp_path / "run", straight)
    ended, expected = ((folder / "results.json").read_text() for folder in folders)
    assert json.loads(ended) == json.loads(expected)


def test_script(files, script_run):
    folder, result = script_run
    assert result.output.count("2 rank(s) on cpu") == 1
    assert "Warning" not in result.output
    assert "train     60 pairs" in result.output
    results = json.loads((folder / "results.json").read_text())
    pairs = list(JsonLines(files / "eval.jsonl"))
    assert [sample[:2] for sample in results["samples"]] == [[p.name, p.summary] for p in pairs]
    scores = rouge([sample[2] for sample in results["samples"]], [p.summary for p in pairs])
    assert results["scores"]["after training"][1:] == pytest.approx(scores)
    for name, (loss, *scores) in results["scores"].items():
        shown = ["-" if loss is None else f"{loss:.3f}", *(f"{100 * s:.1f}" for s in scores)]
        assert re.search(
            rf"^{name} +" + " +".join(map(re.escape, shown)) + "$", result.output, re.M
        )
    numbers = "loss {0}   lr {0}   grad norm {0}   pairs/s {0}   memory MB {0}".format(r"[\d.,e-]+")
    assert re.findall(rf"^step +(\d+)/15   epoch \d   {numbers}$", result.output, re.M) == [
        "2",
        "4",
        "5",
        "6",
        "8",
        "10",
        "12",
        "14",
        "15",
    ]
    losses = [line["eval_loss"] for line in read_metrics(folder) if "eval_loss" in line]
    assert len(losses) == 3
    assert min(losses) == results["scores"]["after training"][0]  # the best epoch's model is judged
    assert min(losses) < results["scores"]["before training"][0]
    assert result.output.count("    generated ") == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    assert isinstance(model, T5ForConditionalGeneration)
    assert not list(folder.glob("model.*"))


def test_the_best_model_is_judged_when_a_later_epoch_is_worse(files, tmp_path):
    """The last evaluation then comes between the training and the loading of the best model."""
    flags = ("--name-epochs", 0, "--lr", 3, "--warmup", 1, "--patience", 1)
    pool.run(SCRIPT, *script_arguments(files, tmp_path), *flags, ranks=2).check()
    losses = [line["eval_loss"] for line in read_metrics(tmp_path) if "eval_loss" in line]
    assert losses[-1] > min(losses)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["scores"]["after training"][0] == min(losses)


def test_a_best_model_that_is_gone_is_named(files, script_run, tmp_path):
    """The last epoch is evaluated again, and would be exported if it were the best."""
    run = tmp_path / "run"
    shutil.copytree(script_run[0], run)
    shutil.rmtree(run / "model")
    (file,) = (run / "checkpoints").glob("*/run.pt")
    state = torch.load(file, weights_only=True)
    state["early_stopping"]["best_loss"] = 0.0
    torch.save(state, file)
    result = pool.run(SCRIPT, *script_arguments(files, run), ranks=2)
    assert result.returncode == 2
    assert result.output.count(f"there is no {run / 'model'}: it was moved") == 1


def test_a_batch_larger_than_a_file_is_refused(files, tmp_path):
    result = pool.run(SCRIPT, *script_arguments(files, tmp_path), "--batch-size", 61)
    assert result.returncode == 2
    assert "--batch-size 61 exceeds the 60 pairs of a file" in result.output


def test_how_a_model_generates_is_kept(files, script_run, tmp_path):
    """What its generation_config.json says holds for the summaries, and for the exported model."""
    before, run = tmp_path / "before", tmp_path / "run"
    shutil.copytree(script_run[0] / "model", before)
    says = {"no_repeat_ngram_size": 1, "min_length": 6}
    file = before / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | says))
    flags = ("--model", before, "--epochs", 1, "--name-epochs", 0, "--dropout", 0)
    pool.run(SCRIPT, *script_arguments(files, run), *flags, ranks=2).check()
    after = json.loads((run / "model/generation_config.json").read_text())
    assert after.items() >= says.items()
    assert json.loads((run / "model/config.json").read_text())["dropout_rate"] == 0
    tokenizer = AutoTokenizer.from_pretrained(before)
    for *_, text in json.loads((run / "results.json").read_text())["samples"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) > 3
        assert len(set(ids)) == len(ids), text


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_model_is_reported_once(files, ranks):
    data = ("--train-file", files / "train.jsonl", "--eval-file", files / "eval.jsonl")
    result = pool.run(SCRIPT, "--model", "nobody/no-such-t5", *data, ranks=ranks)
    assert result.returncode == 2
    message = "train.py: error: --model nobody/no-such-t5: no Config to be had (OSError): "
    assert result.output.count(message) == 1
    assert result.output.splitlines()[-1].startswith(message)


def test_bad_line_ends_one_process_with_status_2(files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a", "summary": "b"}\n{"text": "a"}\n')
    result = pool.run(SCRIPT, "--train-file", bad, "--eval-file", files / "eval.jsonl")
    assert result.returncode == 2
    message = f'train.py: error: {bad}, line 2: expected {{"text": ..., "summary": ...}} with texts'
    assert result.output.splitlines()[-1].startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dim", "48"], "--dim must be a multiple of 32, not 48"),
        (["--batch-size", "9", "--accumulate", "2"], "--batch-size 9 does not divide into 2 equal"),
        (["--profile"], "--profile needs an --output-dir to write to"),
        (["--train-file", "x.jsonl"], "--train-file and --eval-file go together: one was given"),
        (["--dropout", "1"], "--dropout: must be a number from 0 to 0.99, not 1"),
        (["--max-target", "0"], "--max-target: must be an integer of at least 1, not 0"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, flags, message):
    monkeypatch.setattr("sys.argv", ["train.py", *flags])
    with pytest.raises(SystemExit) as exit_:
        config.parse_args()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"train.py: error: {message}")


def test_model_that_is_no_t5(tmp_path, monkeypatch):
    for name, content, message in (
        ("gpt2", {"model_type": "gpt2"}, r"gpt2 is of type gpt2, not t5"),
        ("other", {}, r"other: no Config to be had \(ValueError\): it must be the id of a T5"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            prepare(SimpleNamespace(model=str(tmp_path / name), dropout=0), [])
    monkeypatch.setattr("model.DROPOUT", "dropout")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5/config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match=r"t5 has no dropout: set DROPOUT in task\.py"):
        prepare(SimpleNamespace(model=str(tmp_path / "t5"), dropout=0), [])
    with pytest.raises(UserError, match="no ConditionalGeneration to be had"):
        from_hub(T5ForConditionalGeneration, str(tmp_path / "gpt2"))
    for impossible in (tmp_path / "nothing", "a/b/c"):
        with pytest.raises(UserError, match="no Config to be had"):
            from_hub(AutoConfig, str(impossible))


# ---- pairs from the standard library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The pairs (train, eval, names), and where they lie."""
    folder = tmp_path_factory.mktemp("library")
    return [list(JsonLines(file)) for file in library_files(folder)], folder


def module(pair: Pair) -> str:
    return re.split(r"[/.]", pair.name)[0].lstrip("_")


def test_library_gives_pairs(library):
    (learnt, judged, _), folder = library
    assert len(learnt) > 4000
    assert 200 < len(judged) < 0.12 * len(learnt)
    assert len({module(pair) for pair in judged}) > 10
    known = next(pair for pair in (*learnt, *judged) if pair.name == "bisect.py:insort_right")
    assert known.summary == "Insert item x in list a, and keep it sorted assuming a is sorted."
    assert known.text.startswith("def insort_right(a, x, lo=0, hi=None, *, key=None):\n    if key")
    (only,) = folder.iterdir()
    assert len(list(only.iterdir())) == 3  # no temporary file is left


def test_library_is_read_once(library, monkeypatch):
    monkeypatch.setattr("library.library_functions", lambda: pytest.fail("read again"))
    assert all(file.exists() for file in library_files(library[1]))
    monkeypatch.setenv("LOCAL_RANK", "1")  # local rank 0 writes
    assert not any(file.exists() for file in library_files(library[1] / "elsewhere"))


def test_data_dir_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("library.library_functions", lambda: iter([]))
    with pytest.raises(SystemExit):
        library_files(tmp_path / "file")
    assert f"error: --data-dir {tmp_path / 'file'} cannot be written: " in capsys.readouterr().err


def test_docstring_is_not_in_the_source(library):
    repeated = []
    for text, summary, name in (*library[0][0], *library[0][1]):
        (function,) = ast.parse(text).body  # still a whole one
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), name
        if summary.strip(".") in text:
            repeated.append((name, summary))
    # An error message or a keyword list may hold the same words.
    assert len(repeated) < 30, repeated


def test_nothing_judged_was_learnt(library):
    learnt, judged, names = library[0]
    assert not {module(p) for p in (*learnt, *names)} & {module(p) for p in judged}
    # The library has copies: neither the source nor name and summary together were seen.
    assert not {p.text for p in learnt} & {p.text for p in judged}
    seen = {(p.name.split(":")[1], p.summary) for p in learnt}
    assert not seen & {(p.name.split(":")[1], p.summary) for p in judged}


def test_names_are_those_of_functions_seen(library):
    names = library[0][2]
    assert len(names) > 5000
    for text, name, where in names:
        assert re.match(rf"(@.*\n)?(async )?def _*{name}_*\(|@", text), where
        assert text.count("\n") < 2, where
        assert len(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)) > 1, where


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


def test_functions_in_a_file(tmp_path):
    (tmp_path / "x.py").write_text(SOURCE)
    found = {pair.name: pair[:2] for pair in functions_in(tmp_path / "x.py", "x.py")}
    inner = 'def inner(b):\n    """Add both of the numbers."""\n    return a + b'
    assert found == {
        "x.py:first": (
            "@decorated\nasync def first(self, x):\n    return x[0]",
            "Return the first of them.",
        ),
        "x.py:second": ("def second(self):\n    return 2", "Has its docstring on one line."),
        "x.py:third": ("def third(self, y):\n    return y", ""),  # no whole sentence
        "x.py:outer": (
            "def outer(a):\n\n    " + inner.replace("\n", "\n    ") + "\n    return inner",
            "Return a function, or not.",
        ),
        "x.py:inner": ("def inner(b):\n    return a + b", "Add both of the numbers."),
        "x.py:cut": ("def cut():\n    return 1", ""),
        "x.py:short": ("def short():\n    return 2", ""),  # two words
        "x.py:bare": ("def bare(x):\n    return x", ""),
    }
    (tmp_path / "x.py").write_text("def broken(:\n")
    assert list(functions_in(tmp_path / "x.py", "x.py")) == []


# ---- pairs from files


def test_json_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text": "\u00e4\\nb", "summary": "c", "more": 1}\n{"summary": "d", "text": "e"}'
    )
    dataset = JsonLines(file)
    pairs = [Pair("\u00e4\nb", "c", "a.jsonl:1"), Pair("e", "d", "a.jsonl:2")]
    assert list(dataset) == pairs
    assert [dataset[torch.tensor(1)], dataset[0]] == pairs[::-1]
    checksum = dataset.checksum
    file.write_text(file.read_text().replace("d", "f"))
    assert dataset[1].summary == "f"  # it is read when it is asked for, not held
    assert JsonLines(file).checksum != checksum


def test_bad_lines_are_named(tmp_path):
    good, file = b'{"text": "a", "summary": "b"}', tmp_path / "a.jsonl"
    for bad in (
        b"{'text': 1}",
        b"",
        b"[1]",
        b'{"text": "a"}',
        b'{"text": " ", "summary": "b"}',
        b'{"text": "a", "summary": 3}',
        b'{"text": "half of an emoji: \\ud83d", "summary": "a"}',
        b"\xff\xfe",
    ):
        file.write_bytes(b"\n".join([good, bad, good, b""]))
        with pytest.raises(UserError) as error:
            JsonLines(file)
        shown = bad.decode(errors="replace")
        assert str(error.value) == (
            f'{file}, line 2: expected {{"text": ..., "summary": ...}} with texts that are not '
            f"empty, not {shown!r}"
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty: expected lines of"), (None, "cannot be read: No such file or directory")],
)
def test_useless_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        JsonLines(tmp_path / "a.jsonl")


# ---- tokens, batches, scores


def test_tokenizer_cuts_names_into_words():
    texts = ["def getDefaultTimeout(): return default", "get_default_timeout", "the default. (get"]
    tokenizer = train_tokenizer(text_twice(texts), 301)
    ids = [tokenizer(t)["input_ids"] for t in ("getDefaultTimeout", "get_default timeout")]
    assert ids[0] == ids[1]
    assert ids[0][-1] == tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0
    assert tokenizer("(default")["input_ids"][1:] == tokenizer("default")["input_ids"]
    text = tokenizer.decode(tokenizer("Get the default.")["input_ids"], skip_special_tokens=True)
    assert text == "get the default."
    assert train_tokenizer(text_twice(texts), 301).get_vocab() == tokenizer.get_vocab()


def text_twice(texts: list[str]):
    return lambda: iter(texts)


def test_of_equally_frequent_characters_the_same_are_kept():
    """BpeTrainer keeps any 200 of them: another 200 in each process."""
    letters = [chr(0x4E00 + i) for i in range(300)]
    found = train_tokenizer(text_twice([" ".join(letters[::-1])]), 301).get_vocab().keys()
    assert found & set(letters) == set(letters[:199])  # and the mark of a word's begin


def test_batch_is_cut_and_padded():
    tokenizer = train_tokenizer(text_twice(["get the default value"] * 2), 301)
    get, the, default, value = tokenizer("get the default value")["input_ids"][:4]
    pairs = [Pair("default " * 9, "get the value", ""), Pair("the", "get", "")]
    batch = collate(pairs, tokenizer, SimpleNamespace(prefix="get ", max_source=4, max_target=5))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[get, default, default, 1], [get, the, 1, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
        "labels": [[get, the, value, 1], [get, 1, -100, -100]],  # padding has no loss
    }


def test_batches_are_full_and_similar_in_length():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 101, (1003,), generator=generator)
    batches = epoch_batches(lengths, 8, seed=1)
    assert batches.shape == (1003 // 8, 8)
    assert len(batches.unique()) == batches.numel()
    assert batches.equal(epoch_batches(lengths, 8, seed=1))
    assert not batches.equal(epoch_batches(lengths, 8, seed=2))
    of_batches = lengths[batches]
    padding = 8 * of_batches.max(dim=1).values.sum() - of_batches.sum()
    assert padding < 0.1 * of_batches.sum()  # in random order: 80 %
    assert len(epoch_batches(lengths[:7], 8, seed=1)) == 0


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_shares_are_equally_many_and_complete(count):
    shares = [equal_shares(count, 2, rank, 3) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    counted = [i for share in shares for batch, counts in share for i in batch[:counts]]
    assert sorted(counted) == list(range(count))
    assert all(batch for share in shares for batch, _ in share)


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
