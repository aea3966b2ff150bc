"""What T5 learns from: files of pairs, a text and its summary; a tokenizer; batches of tokens.

A file has one pair a line, {"text": ..., "summary": ...}, and stays on the disk: a rank knows where
each line begins, and reads those of its own batches. Where there are no files, `library_files`
makes some of the functions of Python's standard library.
"""

import ast
import json
import os
import platform
import re
import sysconfig
import uuid
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from arguments import UserError, fail
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
IGNORED = -100  # a label that cross_entropy leaves out: padding


class Pair(NamedTuple):
    text: str
    summary: str
    name: str  # where it is from: "json/decoder.py:raw_decode", or "news.jsonl:17"


class JsonLines(Dataset):
    """The pairs of a file; each is read from the disk when it is asked for.

    The whole file is checked first: a bad line is better met now than after three days. Raises
    `UserError` that names the file and the line.
    """

    def __init__(self, path: Path):
        self.path, self.checksum, lengths = path, 0, []
        try:
            with open(path, "rb") as file:
                for line in file:
                    lengths.append(len(line))
                    self.checksum = zlib.crc32(line, self.checksum)
                    self.parse(line, len(lengths))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not lengths:
            raise UserError(f'{path} is empty: expected lines of {{"text": ..., "summary": ...}}')
        self.lengths = torch.tensor(lengths)  # in bytes
        self.starts = self.lengths.cumsum(0) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Pair:
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            return self.parse(file.readline(), number=int(index) + 1)

    def parse(self, line: bytes, number: int) -> Pair:
        try:
            values = json.loads(line)
            pair = Pair(
                values["text"], values["summary"], values.get("name", f"{self.path.name}:{number}")
            )
            if not (pair.text.strip() and pair.summary.strip()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f'{self.path}, line {number}: expected {{"text": ..., "summary": ...}} with texts '
                f"that are not empty, not {line[:80].decode(errors='replace').strip()!r}"
            ) from None
        return pair


def epoch_batches(lengths: Tensor, batch_size: int, seed: int) -> Tensor:
    """The global batches of an epoch: (batches, batch_size) indices, the same on every rank.

    Pairs of similar length share a batch, or most of it would be padding; otherwise the order is
    random. All batches are full: up to batch_size - 1 pairs are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    pools = torch.randperm(len(lengths), generator=generator).split(20 * batch_size)
    # Sorted, so that also the ranks' shares of a batch, every N-th pair of it, are equally long.
    order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    batches = order[: len(order) // batch_size * batch_size].view(-1, batch_size)
    return batches[torch.randperm(len(batches), generator=generator)]


def make_loader(dataset: JsonLines, batches: list[list[int]], tokenizer, settings) -> DataLoader:
    """Yields the given batches of pairs as tokens; --workers processes read and tokenize."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=partial(collate, tokenizer=tokenizer, settings=settings),
        num_workers=settings.workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: the global one is left to the model's dropout
    )


def collate(pairs: list[Pair], tokenizer, settings) -> dict[str, Tensor]:
    """input_ids, attention_mask and labels, each (batch, longest) int64; what is longer is cut."""
    options = {"truncation": True, "padding": True, "return_tensors": "pt"}
    texts, summaries = [settings.prefix + p.text for p in pairs], [p.summary for p in pairs]
    batch = tokenizer(texts, max_length=settings.max_source, **options)
    target = tokenizer(summaries, max_length=settings.max_target, **options)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORED)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": labels,
    }


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of word pieces from `texts`; the same texts give the same vocabulary.

    getDefaultTimeout and get_default_timeout are both cut into "get default timeout", in lower
    case: the words of a function's name are then the very tokens that its docstring begins with,
    which a model can learn to copy.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    words_of_names = normalizers.Replace(Regex("(?<=[a-z0-9])(?=[A-Z])|_"), " ")
    tokenizer.normalizer = normalizers.Sequence([words_of_names, normalizers.Lowercase()])
    # Cut at spaces and around punctuation. Each word starts with a mark, also after a bracket.
    cut, mark = pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, mark])
    no_space_before_stop = decoders.Replace(Regex(r" (?=[.,:;?!)])"), "")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(), decoders.Fuse(), no_space_before_stop]
    )
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],  # 0 and 1 as in T5
        limit_alphabet=200,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def library_files(data_dir: Path) -> list[Path]:
    """Files of pairs (train, eval, names), written into `data_dir` unless they are there.

    In train and eval, a pair is a function's source and the first line of its docstring. In names,
    where functions without docstrings count too, it is the first two lines of the source and the
    name, if that has several words. Modules in eval are in nothing else.

    Call it before joining the job: local rank 0 does the work, the others return at once and wait
    for it when they join.
    """
    folder = data_dir / f"python-{platform.python_version()}"
    files = [folder / f"{part}.jsonl" for part in ("train", "eval", "names")]
    if os.environ.get("LOCAL_RANK", "0") != "0" or files[-1].exists():  # it is written last
        return files
    train, held_out, names = [], [], []
    for pair in library_functions():
        path, name = pair.name.split(":")
        # A checksum of the module or package decides: the same on every machine.
        module = re.split(r"[/.]", path)[0].lstrip("_")
        is_held_out = zlib.crc32(module.encode()) % 10 == 0
        if pair.summary:
            (held_out if is_held_out else train).append(pair)
        if re.search(r"[a-z0-9](_[^_]|[A-Z])", name) and not is_held_out:
            first_lines = "\n".join(pair.text.split("\n")[:2])
            names.append(Pair(first_lines, name.strip("_"), pair.name))
    # The library has copies of functions: one that the model has seen would prove nothing.
    seen = {(pair.name.split(":")[1], pair.summary) for pair in train}
    held_out = [pair for pair in held_out if (pair.name.split(":")[1], pair.summary) not in seen]
    # In an order without meaning, so that the first hundred speak for all of them.
    held_out.sort(key=lambda pair: zlib.crc32(pair.name.encode()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, pairs in zip(files, (train, held_out, names), strict=True):
            temporary = folder / uuid.uuid4().hex  # of this node's own: several may share the disk
            temporary.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in pairs))
            os.replace(temporary, file)
    except OSError as error:
        fail(f"--data-dir {data_dir} cannot be written: {error.strerror}")
    return files


def library_functions() -> Iterator[Pair]:
    """Each function of Python's standard library; without a summary if it has none."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        file = path.relative_to(library)
        if NOT_LIBRARY.isdisjoint(file.parts):
            yield from functions_in(path, file.as_posix())


def functions_in(path: Path, file: str) -> Iterator[Pair]:
    """(source without the docstring, the docstring's first line, "file:name") of each function."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # the library has some that are broken on purpose
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                del node.body[0]
            if node.body:
                yield Pair(ast.unparse(node), first_line(docstring or ""), f"{file}:{node.name}")


def first_line(docstring: str) -> str:
    """The first line, if it is a sentence of 3 to 16 words and no example; otherwise ""."""
    first, _, rest = docstring.partition("\n")
    is_whole = first.endswith(".") or not rest.split("\n")[0].strip()
    is_plain = first.isascii() and ">>>" not in first
    return first if is_whole and is_plain and 3 <= len(first.split()) <= 16 else ""
