"""Train, stop, resume, generate with and export a tiny T5 on these ranks; rank 0 saves the results.

Started by test_t5_finetuning_t5.py. The reference, a plain T5 on the whole batch that knows nothing
of FSDP, is computed by every rank on its own.
"""

import os
import signal
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "t5_finetuning"))

import evaluate
import torch
import torch.distributed as dist
import train
from data import IGNORED, encode, python_pairs, read_json_lines
from model import export, fill, make_sharded_model, prepare
from runtime import distributed_worker
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5ForConditionalGeneration
from transformers.utils import logging

FOLDER = Path(sys.argv[1])
BATCH, STEPS = 12, 3
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "adamw, clip": {"optimizer": "adamw", "clip": 0.05},
    "sgd, accumulate": {"accumulate": 3},
    "adamw, activation checkpointing": {"optimizer": "adamw", "checkpointing": True},
    "sgd, bf16": {"precision": "bf16"},
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def arguments(*more):
    """The script's own defaults, made tiny."""
    tiny = (
        "--dim 32 --layers 2 --vocab-size 301 --max-source 16 --max-target 8 --dropout 0 --clip 0"
    )
    files = ["--train-file", FOLDER / "train.jsonl", "--eval-file", FOLDER / "eval.jsonl"]
    sys.argv = ["train.py", *tiny.split(), f"--batch-size={BATCH}", *map(str, files)]
    sys.argv += ["--device=cpu", *map(str, more)]
    return train.parse_args()


def padded(rows, filler):
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def plain_loss(model, samples):
    """The loss as transformers computes it: the mean over all target tokens."""
    source = padded([s.source for s in samples], 0)
    labels = padded([s.target for s in samples], IGNORED)
    return model(input_ids=source, attention_mask=(source != 0).long(), labels=labels).loss


def whole(values) -> dict:
    """name -> the whole tensor, from shards or not; all ranks call this."""
    found = {}
    for name, value in values:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = value.detach().clone()
    return found


def run_case(data, worker, optimizer="sgd", clip=0.0, accumulate=1, checkpointing=False, **more):
    flags = ["--clip", clip, "--accumulate", accumulate]
    flags += ["--activation-checkpointing"] * checkpointing
    args = arguments(*flags, *(f"--{name}={value}" for name, value in more.items()))
    config, _, train_set, eval_set = data
    model = make_sharded_model(config, args, worker)
    torch.manual_seed(args.seed)
    reference = T5ForConditionalGeneration(config)
    one, sharded = (OPTIMIZERS[optimizer](m.parameters()) for m in (reference, model))
    result = {"ties": [ties(model)], "steps": [], "names": [n for n, _ in model.named_parameters()]}
    result["held"] = sum(p.to_local().numel() for p in model.parameters())
    for step in range(STEPS):
        batch = train_set[BATCH * step : BATCH * (step + 1)]
        one.zero_grad()
        expected = plain_loss(reference, batch)
        expected.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        one.step()
        loss = train.train_step(model, sharded, batch, 0, args, worker)
        result["steps"].append(
            {
                "loss": evaluate.all_sum([loss], worker)[0],
                "expected loss": expected.item(),
                "norm": norm.item(),
                "gradients": whole((n, p.grad) for n, p in model.named_parameters()),
                "expected gradients": whole((n, p.grad) for n, p in reference.named_parameters()),
                "parameters": whole(model.named_parameters()),
                "expected parameters": whole(reference.named_parameters()),
            }
        )
        result["ties"].append(ties(model))
        # In between: the next step must not see values that evaluation has left gathered.
        loss = evaluate.evaluate(model, eval_set, 0, args, worker)
        reference.eval()
        with torch.no_grad():
            result["eval loss"] = loss, plain_loss(reference, eval_set).item()
        reference.train()
    return result, model


def generated(data, worker) -> tuple[list, list]:
    """What the ranks write about 11 texts, and about 1; what one process writes about the 11."""
    config, tokenizer, train_set, samples = data
    args = arguments()
    torch.manual_seed(args.seed)
    model, plain = make_sharded_model(config, args, worker), T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(40):  # untrained, it would write the same about every text
        optimizer.zero_grad()
        plain_loss(plain, train_set).backward()
        optimizer.step()
    fill(model, lambda: plain, worker)
    texts = [evaluate.generate(model, samples[:n], tokenizer, args, worker) for n in (11, 1)]
    source = padded([s.source for s in samples], 0)
    options = {"max_new_tokens": args.max_target, **evaluate.SEARCH}
    tokens = plain.eval().generate(source, attention_mask=source != 0, **options)
    return texts, tokenizer.batch_decode(tokens, skip_special_tokens=True)


def ties(model) -> bool:
    """One parameter, in all four places."""
    places = (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head)
    return all(place.weight is model.shared.weight for place in places)


def three_gradients(config, batch) -> dict:
    """The gradients of the three uses of the shared matrix, as if it were three matrices."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    places = (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head)
    for place in places:
        place.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    plain_loss(model, batch).backward()
    return [place.weight.grad for place in places]


def exported(model, config, tokenizer, eval_set, worker) -> dict:
    folder = FOLDER / "exported"
    export(model, config, tokenizer, folder, worker)
    loaded, tokens = (
        AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    source = padded([s.source for s in eval_set], 0)
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
    options = ["--name-epochs=1", "--epochs=2", "--log-every=1", "--dropout=0.1", "--patience=9"]
    real, export, finished = train.train_step, train.export, []
    exports = {"straight": [], "stopped": []}
    for name, stops in (("straight", 0), ("stopped", 3), ("stopped", 0)):
        args = arguments(*options, "--eval-samples=5", "--output-dir", FOLDER / name)
        pairs = [read_json_lines(file) for file in (args.train_file, args.eval_file)]
        names = [pair._replace(summary=pair.text[4:20]) for pair in pairs[0][:40]]  # used again
        train.python_pairs = lambda _, pairs=(*pairs, names): pairs
        args.train_file = args.eval_file = None
        done = []

        def step(*values, stops=stops, done=done):
            done.append(1)
            if len(done) == stops and worker.rank == worker.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*values)

        def count(*values, done=done, exports=exports[name]):
            exports.append(len(done))
            return export(*values)

        train.train_step, train.export = step, count
        finished.append(train.train(args, args.output_dir, worker))
    train.train_step, train.export = real, export
    return {"finished": finished, "exports": exports["straight"]}


def measure(worker) -> dict:
    args = arguments()
    pairs = [read_json_lines(file) for file in (args.train_file, args.eval_file)]
    config, tokenizer = prepare(args, pairs[0])  # the same on all ranks: no random choice in it
    data = config, tokenizer, *(encode(tokenizer, p, 16, 8) for p in pairs)
    results = {"cases": {}, "stop and resume": stop_and_resume(worker)}
    for name, case in CASES.items():
        results["cases"][name], model = run_case(data, worker, **case)
        if name == "adamw":
            results["export"] = exported(model, config, tokenizer, data[3], worker)
            args = arguments("--model", FOLDER / "exported")
            config, _ = prepare(args, [])
            again = make_sharded_model(config, args, worker)
            results["loaded"] = whole(again.named_parameters()), ties(again)
    results["generated"], results["expected text"] = generated(data, worker)
    results["pairs"] = python_pairs(worker)
    others = [None] * worker.world_size
    dist.all_gather_object(others, zlib.crc32(repr(results["pairs"]).encode()))
    results["all ranks have the same pairs"] = len(set(others)) == 1
    results["uses"] = three_gradients(config, data[2][:BATCH])
    results["targets"] = [[len(s.target) for s in data[2][i : i + BATCH]] for i in (0, BATCH)]
    return results


def main() -> None:
    logging.disable_progress_bar()
    with distributed_worker("cpu") as worker:
        results = measure(worker)
        if worker.is_main:
            torch.save(results, FOLDER / "results.pt")


if __name__ == "__main__":
    main()
