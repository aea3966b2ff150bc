"""Train, stop, resume, generate with and export a tiny T5 on these ranks; rank 0 saves the results.

Started by test_t5_finetuning.py. The reference, a plain T5 on the whole batch that knows nothing
of FSDP, is computed by every rank on its own.
"""

import multiprocessing
import os
import signal
import sys
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "t5_finetuning"))

import config
import evaluate
import task
import torch
import torch.distributed as dist
import train
from arguments import UserError
from data import JsonLines, epoch_batches
from materialize import initialize
from model import export, prepare
from runtime import distributed_worker
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5ForConditionalGeneration
from transformers.utils import logging

FOLDER = Path(sys.argv[1])
BATCH, STEPS = 12, 3
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "adamw, clip": {"optimizer": "adamw", "clip": 0.05},
    "sgd, accumulate": {"accumulate": 3},
    "sgd, accumulate, reduce once": {"accumulate": 3, "once": True},
    "adamw, activation checkpointing": {"optimizer": "adamw", "checkpointing": True},
    "sgd, bf16": {"precision": "bf16"},
}
HAD_MEMORY = []  # parameters that took memory before they were sharded
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def settings_of(*more):
    """The script's own defaults, made tiny."""
    tiny = (
        "--dim 32 --layers 2 --vocab-size 301 --max-source 16 --max-target 8 --dropout 0 --clip 0"
    )
    sys.argv = ["train.py", *tiny.split(), f"--batch-size={BATCH}", "--device=cpu"]
    sys.argv += map(str, more)
    return config.parse_args()


def tokens_of(tokenizer, texts: list[str], longest: int) -> list[list[int]]:
    """One text after the other: nothing is padded."""
    return [tokenizer(text, max_length=longest, truncation=True)["input_ids"] for text in texts]


def padded(rows, filler):
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def plain_loss(model, tokenizer, pairs):
    """The loss as transformers computes it: the mean over all target tokens."""
    source = padded(tokens_of(tokenizer, [pair.text for pair in pairs], 16), 0)
    labels = padded(tokens_of(tokenizer, [pair.summary for pair in pairs], 8), -100)
    return model(input_ids=source, attention_mask=(source != 0).long(), labels=labels).loss


class Operations(TorchDispatchMode):
    """The names of all operations inside the block, FSDP's collectives among them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def whole(values) -> dict:
    """name -> the whole tensor, from shards or not; all ranks call this."""
    found = {}
    for name, value in values:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = value.detach().clone()
    return found


def noting_memory(module, *, real=train.fully_shard, **options):
    HAD_MEMORY.extend(name for name, p in module.named_parameters() if not p.is_meta)
    return real(module, **options)


def make_sharded_model(t5_config, settings, worker):
    model = train.shard(t5_config, settings, worker)
    initialize(model, partial(train.build_whole, t5_config, settings), worker)
    return model


def run_case(
    data, worker, optimizer="sgd", clip=0.0, accumulate=1, checkpointing=False, once=False, **more
):
    flags = ["--clip", clip, "--accumulate", accumulate, "--workers", 1 if accumulate > 1 else 0]
    flags += ["--activation-checkpointing"] * checkpointing + ["--reduce-once"] * once
    settings = settings_of(*flags, *(f"--{name}={value}" for name, value in more.items()))
    t5_config, tokenizer, train_set, eval_set = data
    model = make_sharded_model(t5_config, settings, worker)
    torch.manual_seed(settings.seed)
    reference = T5ForConditionalGeneration(t5_config)
    one, sharded = (OPTIMIZERS[optimizer](m.parameters()) for m in (reference, model))
    early_stopping = evaluate.EarlyStopping(patience=1)
    batches = train.batches([train_set], 0, early_stopping, tokenizer, settings, worker)
    global_batches = epoch_batches(train_set.lengths, BATCH, settings.seed)
    result = {"ties": [ties(model)], "steps": [], "names": [n for n, _ in model.named_parameters()]}
    units = [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
    result["units"] = sorted(units)
    result["held"] = sum(p.to_local().numel() for p in model.parameters())
    for (_, batch), indices in zip(islice(batches, STEPS), global_batches, strict=False):
        one.zero_grad()
        expected = plain_loss(reference, tokenizer, [train_set[i] for i in indices])
        expected.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        one.step()
        with Operations() as operations:
            loss, sharded_norm = train.train_step(model, batch, sharded, settings, worker)
        result["steps"].append(
            {
                "loss": loss.item(),
                "expected loss": expected.item(),
                "reduce_scatters": sum("reduce_scatter" in name for name in operations.names),
                "rows": len(batch["labels"]),
                "norm": sharded_norm.item(),
                "expected norm": norm.item(),
                "gradients": whole((n, p.grad) for n, p in model.named_parameters()),
                "expected gradients": whole((n, p.grad) for n, p in reference.named_parameters()),
                "parameters": whole(model.named_parameters()),
                "expected parameters": whole(reference.named_parameters()),
            }
        )
        result["ties"].append(ties(model))
        # In between: the next step must not see values that evaluation has left gathered.
        loss = evaluate.evaluate(model, eval_set, tokenizer, settings, worker)
        reference.eval()
        with torch.no_grad():
            expected = plain_loss(reference, tokenizer, list(eval_set))
        result["eval loss"] = loss, expected.item()
        reference.train()
    return result, model


def generated(data, worker) -> tuple[list, list]:
    """What the ranks write about 11 texts, and about 1; what one process writes about the 11."""
    t5_config, tokenizer, train_set, eval_set = data
    settings = [settings_of("--eval-samples", count, "--workers", 1) for count in (20, 1)]
    torch.manual_seed(settings[0].seed)
    model = make_sharded_model(t5_config, settings[0], worker)
    plain = T5ForConditionalGeneration(t5_config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(40):  # untrained, it would write the same about every text
        optimizer.zero_grad()
        plain_loss(plain, tokenizer, list(train_set)).backward()
        optimizer.step()
    initialize(model, lambda: plain, worker)
    texts = [evaluate.generate(model, eval_set, tokenizer, each, worker) for each in settings]
    source = padded(tokens_of(tokenizer, [pair.text for pair in eval_set], 16), 0)
    options = {"max_new_tokens": 8, **task.SEARCH}
    tokens = plain.eval().generate(source, attention_mask=source != 0, **options)
    return texts, tokenizer.batch_decode(tokens, skip_special_tokens=True)


def ties(model) -> bool:
    """One parameter, in all four places."""
    places = (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head)
    return all(place.weight is model.shared.weight for place in places)


def three_gradients(t5_config, tokenizer, pairs) -> list:
    """The gradients of the three uses of the shared matrix, as if it were three matrices."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(t5_config)
    places = (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head)
    for place in places:
        place.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    plain_loss(model, tokenizer, pairs).backward()
    return [place.weight.grad for place in places]


def exported(model, t5_config, tokenizer, eval_set, worker) -> dict:
    folder = FOLDER / "exported"
    export(model, t5_config, tokenizer, folder, worker)
    loaded, tokens = (
        AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    source = padded(tokens_of(tokenizer, [pair.text for pair in eval_set], 16), 0)
    inputs = {"input_ids": source, "attention_mask": (source != 0).long()}
    inputs["decoder_input_ids"] = torch.zeros(len(source), 1, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        logits = [m(**inputs).logits for m in (model, loaded)]
    return {
        "logits": logits,
        "tied": loaded.lm_head.weight is loaded.shared.weight,
        "architectures": loaded.config.architectures,
        "tokens": [t("getFreshIDs(get_name, None) ...")["input_ids"] for t in (tokens, tokenizer)],
    }


def stop_and_resume(worker) -> dict:
    """Train once without a break, and once with a SIGTERM to one rank in the middle of an epoch.

    The first of three epochs is on "names", as if the pairs were from Python's own library. Also
    returned: how many steps the run without a break had done at each export of the best model.
    """
    options = ["--name-epochs=1", "--epochs=3", "--log-every=1", "--dropout=0.1", "--patience=9"]
    files = [FOLDER / f"{part}.jsonl" for part in ("train", "eval", "names")]
    real_step, real_export, real_evaluate = train.train_step, train.export, train.evaluate
    finished, steps, exports, evaluations, losses, norms = [], [], [], [], [], []
    seeds = [None] * worker.world_size  # of the random numbers of each rank

    def run(folder: Path, *more, stop_at: int = 0, names: bool = True) -> None:
        def step(*values):
            steps[-1] += 1
            if None in seeds:
                dist.all_gather_object(seeds, torch.initial_seed())
            if steps[-1] == stop_at and worker.rank == worker.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            loss, norm = real_step(*values)
            losses.append(loss.item())
            norms.append(norm.item())
            return loss, norm

        def export(*values):
            exports[-1].append(steps[-1])
            return real_export(*values)

        def evaluate(*values):
            evaluations[-1] += 1
            return real_evaluate(*values)

        train.train_step, train.export, train.evaluate = step, export, evaluate
        steps.append(0)
        exports.append([])
        evaluations.append(0)
        settings = settings_of(*options, "--eval-samples=5", "--output-dir", folder, *more)
        used = files if names else files[:2]
        finished.append(train.train(settings, used, settings.output_dir, worker))

    def refused(*values, **options) -> str:
        try:
            run(*values, **options)
        except UserError as error:
            return str(error)
        return "not refused"

    run(FOLDER / "straight")
    norms_of_straight = norms[:]
    losses_of_ranks = [None] * worker.world_size
    dist.all_gather_object(losses_of_ranks, losses)
    run(FOLDER / "stopped", stop_at=3)
    run(FOLDER / "stopped")
    results = {
        "finished": finished[:],
        "seeds": seeds,
        "losses of ranks": losses_of_ranks,
        "norms": norms_of_straight,
        "exports": exports[0],
        "evaluations": evaluations[:],
        "infinite": refused(FOLDER / "infinite", "--lr=1e30", "--warmup=0"),
        "infinite saved": len(list((FOLDER / "infinite/checkpoints").glob("step_*"))),
        "other names": refused(FOLDER / "straight", "--name-epochs=0"),
    }
    run(FOLDER / "longer", "--epochs=2")
    run(FOLDER / "longer", "--epochs=3")
    results["made longer"] = finished[-2:], steps[-2:]
    files[0] = FOLDER / "names.jsonl"
    results["other data"] = refused(FOLDER / "stopped")
    train.train_step, train.export, train.evaluate = real_step, real_export, real_evaluate
    return results


class WithTable(T5ForConditionalGeneration):
    """With a buffer that is not in the state dict, as a rotary table is."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", torch.arange(1, 6) / 7, persistent=False)


def buffer_of_a_sharded_model(t5_config, worker) -> torch.Tensor:
    real, train.MODEL = train.MODEL, WithTable
    model = make_sharded_model(t5_config, settings_of(), worker)
    train.MODEL = real
    tables = [None] * worker.world_size
    dist.all_gather_object(tables, model.table)
    return torch.stack(tables)


def measure(worker) -> dict:
    train_set, eval_set = (JsonLines(FOLDER / f"{part}.jsonl") for part in ("train", "eval"))
    # The same on all ranks: there is no random choice in it.
    t5_config, _, tokenizer = prepare(settings_of(), train_set)
    data = t5_config, tokenizer, train_set, eval_set
    train.fully_shard = noting_memory
    results = {"cases": {}, "stop and resume": stop_and_resume(worker)}
    for name, case in CASES.items():
        results["cases"][name], model = run_case(data, worker, **case)
        if name == "adamw":
            results["export"] = exported(model, t5_config, tokenizer, eval_set, worker)
            settings = settings_of("--model", FOLDER / "exported")
            again = make_sharded_model(prepare(settings, train_set)[0], settings, worker)
            results["loaded"] = whole(again.named_parameters()), ties(again)
    results["generated"], results["expected text"] = generated(data, worker)
    batches = epoch_batches(train_set.lengths, BATCH, seed=0)[:2]
    pairs = [[train_set[i] for i in batch] for batch in batches]
    results["had memory"] = HAD_MEMORY
    results["buffer"] = buffer_of_a_sharded_model(t5_config, worker)
    results["uses"] = three_gradients(t5_config, tokenizer, pairs[0])
    results["targets"] = [
        [len(ids) for ids in tokens_of(tokenizer, [pair.summary for pair in batch], 8)]
        for batch in pairs
    ]
    return results


def main() -> None:
    logging.disable_progress_bar()
    # As where torchrun starts the ranks: from tests/pool.py's they would inherit a forkserver.
    multiprocessing.set_start_method("fork", force=True)
    with distributed_worker("cpu") as worker:
        results = measure(worker)
        if worker.is_main:
            torch.save(results, FOLDER / "results.pt")


if __name__ == "__main__":
    main()
