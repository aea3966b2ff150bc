"""How good the summaries are: loss, generation over all ranks, ROUGE; and when to stop."""

import json
import math
import re
import textwrap

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import collate, equal_shares
from model import gathered
from runtime import Worker

ROUGE = ("rouge1", "rouge2", "rougeL")
# The likeliest token each time, those that were written already made less likely: a model that has
# learnt little falls into loops, "the current current current". The penalty is that of Keskar et
# al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019.
SEARCH = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.5}


def loss_sum(model, samples: list, pad: int, worker: Worker) -> torch.Tensor:
    """The sum of the losses of all target tokens."""
    source, mask, target = collate(samples, pad, worker.device)
    inputs = model.prepare_decoder_input_ids_from_labels(target)  # shifted: the tokens before
    logits = model(source, mask, inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model, samples: list, pad: int, args, worker: Worker) -> float:
    """Mean loss per target token over all samples, each counted once."""
    loss = tokens = 0
    model.eval()
    for batch, count in equal_shares(samples, args.batch_size, worker):
        value = loss_sum(model, batch, pad, worker)  # also if none counts: it is a collective
        if count:
            loss, tokens = loss + value, tokens + sum(len(s.target) for s in batch)
    model.train()
    loss, tokens = all_sum([loss, tokens], worker)
    return loss / tokens


@torch.no_grad()
def generate(model, samples: list, tokenizer, args, worker: Worker) -> list[str]:
    """A summary of each sample, in their order, on every rank."""
    mine = []
    model.eval()
    with gathered(model):
        for batch, count in equal_shares(samples, args.batch_size, worker):
            source, mask, _ = collate(batch, tokenizer.pad_token_id, worker.device)
            tokens = model.generate(
                input_ids=source,
                attention_mask=mask,
                max_new_tokens=args.max_target,
                **SEARCH,
                # Each token is a forward pass: a rank that is ready runs on until all are.
                synced_gpus=worker.world_size > 1,
            )
            mine += tokenizer.batch_decode(tokens, skip_special_tokens=True)[:count]
    model.train()
    all_ranks = [None] * worker.world_size
    dist.all_gather_object(all_ranks, mine)
    return [all_ranks[i % worker.world_size][i // worker.world_size] for i in range(len(samples))]


def all_sum(values: list, worker: Worker) -> list[float]:
    """Each value summed over all ranks."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=worker.device)
    dist.all_reduce(total)
    return total.tolist()


def rouge(generated: list[str], references: list[str]) -> list[float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (F-measures, 0 to 1): means over the pairs.

    Overlap of words, of word pairs, and the longest common subsequence of words; upper and lower
    case are the same. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    from rouge_score.rouge_scorer import RougeScorer  # slow to import, and rank 0 alone needs it

    scorer = RougeScorer(ROUGE)
    scores = [scorer.score(ref, own) for ref, own in zip(references, generated, strict=True)]
    return [sum(score[kind].fmeasure for score in scores) / len(scores) for kind in ROUGE]


def first_words(text: str, count: int) -> str:
    """The summary that costs nothing: the first words of the text (an_identifier is two)."""
    return " ".join(re.findall(r"[^\W_]+", text)[:count])


class EarlyStopping:
    """Tells when the loss has not improved for `patience` evaluations; part of the checkpoint."""

    def __init__(self, patience: int):
        self.patience, self.best, self.since = patience, math.inf, 0

    def improved(self, loss: float) -> bool:
        better = loss < self.best
        self.best, self.since = (loss, 0) if better else (self.best, self.since + 1)
        return better

    @property
    def over(self) -> bool:
        return self.since >= self.patience

    def state_dict(self) -> dict:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict) -> None:
        self.best, self.since = state["best"], state["since"]


def report(before, after, train_pairs, eval_pairs, args) -> None:
    """Print the scores and some of the summaries; all of them go into OUTPUT_DIR/results.json.

    before, after: (eval loss, generated summaries) of the new or the given model, and of the best.
    """
    judged = eval_pairs[: len(after[1])]
    references = [pair.summary for pair in judged]
    count = round(sum(len(pair.summary.split()) for pair in train_pairs) / len(train_pairs))
    costless = None, [first_words(pair.text, count) for pair in judged]
    rows = {"before training": before, f"first {count} words of it": costless}
    rows["after training"] = after
    rows = {name: [loss, *rouge(texts, references)] for name, (loss, texts) in rows.items()}
    print(f"\n{len(eval_pairs)} texts for the loss, {len(judged)} of them for ROUGE")
    print_scores(rows)
    samples = list(zip([pair.name for pair in judged], references, after[1], strict=True))
    every = max(1, len(samples) // max(1, args.show))
    print_samples(samples[::every][: args.show])
    if args.output_dir:
        results = {"scores": rows, "samples": samples}
        (args.output_dir / "results.json").write_text(json.dumps(results, indent=1))


def print_scores(rows: dict[str, list[float | None]]) -> None:
    """rows: name -> eval loss (None: it has none), ROUGE-1, -2, -L from 0 to 1."""
    print(f"{'':26}{'eval loss':>10}{'ROUGE-1':>10}{'ROUGE-2':>10}{'ROUGE-L':>10}")
    for name, (loss, *scores) in rows.items():
        shown = f"{'-':>10}" if loss is None else f"{loss:10.3f}"
        print(f"{name:26}{shown}" + "".join(f"{100 * score:10.1f}" for score in scores))


def print_samples(samples: list[tuple[str, str, str]]) -> None:
    """samples: (name, reference, generated)."""
    for name, reference, generated in samples:
        print(f"\n{textwrap.shorten(name, 96)}")
        for label, text in (("written", reference), ("generated", generated)):
            print(f"    {label:10}{textwrap.shorten(text, 84, placeholder=' ...')}")
