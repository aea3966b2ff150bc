"""How good the summaries are: loss, generation over all ranks, ROUGE; and when to stop."""

import json
import math
import re
import textwrap
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from data import IGNORED, JsonLines, make_loader
from model import gathered
from runtime import Worker
from task import collate, compute_loss, generate_texts
from torch import Tensor

ROUGE = ("rouge1", "rouge2", "rougeL")


@torch.no_grad()
def evaluate(model, dataset: JsonLines, tokenizer, settings, worker: Worker) -> float:
    """Mean loss per target token over all pairs, each counted once."""
    total_loss = total_tokens = 0
    model.eval()
    for batch, count in local_batches(dataset, len(dataset), tokenizer, settings, worker):
        loss_sum, tokens = compute_loss(model, batch)  # also if none counts: it is a collective
        if count:
            total_loss += loss_sum
            total_tokens += tokens
    model.train()
    total_loss, total_tokens = all_sum([total_loss, total_tokens], worker)
    return total_loss / total_tokens


@torch.no_grad()
def generate(model, dataset: JsonLines, tokenizer, settings, worker: Worker) -> list[str]:
    """A summary of each of the first --eval-samples texts, in their order, on every rank."""
    samples = min(settings.eval_samples, len(dataset))
    local_texts = []
    model.eval()
    with gathered(model):
        for batch, count in local_batches(dataset, samples, tokenizer, settings, worker):
            texts = generate_texts(
                model, batch, tokenizer, settings.max_target, synced=worker.world_size > 1
            )
            local_texts += texts[:count]
    model.train()
    all_texts = [None] * worker.world_size
    dist.all_gather_object(all_texts, local_texts)
    return [all_texts[i % worker.world_size][i // worker.world_size] for i in range(samples)]


def local_batches(
    dataset: JsonLines, samples: int, tokenizer, settings, worker: Worker
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield this rank's batches of the first `samples` pairs, and how many pairs of each count."""
    # As many at a time as in training: that is known to fit into memory.
    micro_batch = settings.batch_size // worker.world_size // settings.accumulate
    shares = equal_shares(samples, micro_batch, worker.rank, worker.world_size)
    collate_pairs = partial(collate, tokenizer=tokenizer, settings=settings)
    indices = [indices for indices, _ in shares]
    loader = make_loader(dataset, indices, collate_pairs, settings.workers)
    for batch, (_, count) in zip(loader, shares, strict=True):
        yield {name: tensor.to(worker.device) for name, tensor in batch.items()}, count


def equal_shares(
    samples: int, batch_size: int, rank: int, world_size: int
) -> list[tuple[list[int], int]]:
    """This rank's part of the indices 0 to samples - 1: (a batch of them, how many of it count).

    All ranks get equally many batches, though the samples may not divide: with sharded parameters
    every forward pass is a collective. Where nothing is left, sample 0 runs and does not count.
    """
    local_indices = list(range(rank, samples, world_size))
    most = math.ceil(samples / world_size)  # what rank 0 has
    batches = [local_indices[i : i + batch_size] for i in range(0, most, batch_size)]
    return [(batch or [0], len(batch)) for batch in batches]


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
    scores = [scorer.score(*texts) for texts in zip(references, generated, strict=True)]
    return [sum(score[kind].fmeasure for score in scores) / len(scores) for kind in ROUGE]


def first_words(text: str, count: int) -> str:
    """The summary that costs nothing: the first words of the text (an_identifier is two)."""
    return " ".join(re.findall(r"[^\W_]+", text)[:count])


class EarlyStopping:
    """Tells when the loss has not improved for `patience` epochs; part of the checkpoint."""

    def __init__(self, patience: int):
        self.patience = patience
        self.best_loss = math.inf
        self.epochs_without_better = 0

    def improved(self, loss: float) -> bool:
        if loss < self.best_loss:
            self.best_loss, self.epochs_without_better = loss, 0
            return True
        self.epochs_without_better += 1
        return False

    @property
    def over(self) -> bool:
        return self.epochs_without_better >= self.patience

    def state_dict(self) -> dict:
        return {"best_loss": self.best_loss, "epochs_without_better": self.epochs_without_better}

    def load_state_dict(self, state: dict) -> None:
        self.best_loss = state["best_loss"]
        self.epochs_without_better = state["epochs_without_better"]


class Before:
    """What the model reached before training: in the checkpoint, as it is measured once."""

    def __init__(self):
        self.loss, self.texts = math.nan, []

    def state_dict(self) -> dict:
        return {"loss": self.loss, "texts": self.texts}

    def load_state_dict(self, state: dict) -> None:
        self.loss, self.texts = state["loss"], state["texts"]


def describe(model, train_set: JsonLines, eval_set: JsonLines, tokenizer, settings) -> None:
    """Print what is trained, and how much of the texts the model sees."""
    parameters = sum(p.numel() for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"{parameters:,} parameters, rank 0 holds {held:,} of them   {len(tokenizer):,} tokens")
    for name, dataset in (("train", train_set), ("eval", eval_set)):
        first_pairs = [dataset[i] for i in range(min(500, len(dataset)))]
        batch = collate(first_pairs, tokenizer, settings)
        texts = (batch["attention_mask"].sum(1) == settings.max_source).float().mean()
        summaries = ((batch["labels"] != IGNORED).sum(1) == settings.max_target).float().mean()
        print(
            f"{name:6}{len(dataset):6,} pairs; of the first {len(first_pairs)}, {texts:.0%} of the "
            f"texts fill all {settings.max_source} tokens and are cut, {summaries:.0%} of the "
            f"summaries all {settings.max_target}",
            flush=True,
        )


def report(
    before: tuple[float, list[str]],
    after: tuple[float, list[str]],
    train_set: JsonLines,
    eval_set: JsonLines,
    settings,
) -> None:
    """Print the scores and some of the summaries; all of them go into OUTPUT_DIR/results.json.

    before, after: (eval loss, generated summaries) of the new or the given model, and of the best.
    """
    pairs = [eval_set[i] for i in range(len(after[1]))]
    references = [pair.summary for pair in pairs]
    count = round(sum(len(pair.summary.split()) for pair in train_set) / len(train_set))
    scores = {
        "before training": [before[0], *rouge(before[1], references)],
        f"first {count} words of it": [
            None,
            *rouge([first_words(pair.text, count) for pair in pairs], references),
        ],
        "after training": [after[0], *rouge(after[1], references)],
    }
    print(f"\n{len(eval_set)} texts for the loss, {len(pairs)} of them for ROUGE")
    print_scores(scores)
    samples = list(zip([pair.name for pair in pairs], references, after[1], strict=True))
    every = max(1, len(samples) // max(1, settings.show))
    print_samples(samples[::every][: settings.show])
    if settings.output_dir:
        results = {"scores": scores, "samples": samples}
        (settings.output_dir / "results.json").write_text(json.dumps(results, indent=1))


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
