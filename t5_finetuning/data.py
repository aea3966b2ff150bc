"""What T5 learns from: pairs of a text and its summary, a tokenizer for them, batches of them."""

import ast
import json
import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from arguments import UserError
from runtime import Worker
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
IGNORED = -100  # a label that cross_entropy leaves out: padding


class Pair(NamedTuple):
    text: str
    summary: str
    name: str  # where it is from: "json/decoder.py:JSONDecoder.decode", or "news.jsonl:17"


class Sample(NamedTuple):
    source: list[int]  # token ids, the end mark included
    target: list[int]


def python_pairs(worker: Worker) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """(train, eval, names): functions of Python's standard library and what they are called.

    In train and eval, a pair is a function's source and the first line of its docstring. In names,
    where functions without docstrings count too, it is the first two lines of the source and the
    name, if that has several words. Modules in eval are in nothing else.

    Each rank reads its share of the files and gets the others' pairs: all return the same.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [f for f in library.rglob("*.py") if not NOT_LIBRARY & {*f.relative_to(library).parts}]
    files = sorted(f.relative_to(library).as_posix() for f in files)
    mine = [p for f in files[worker.rank :: worker.world_size] for p in pairs_in(library / f, f)]
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, mine)
    pairs = sorted((pair for part in everyone for pair in part), key=lambda pair: pair.name)
    documented = [pair for pair in pairs if pair.summary]
    if len(documented) < 1000:
        raise UserError(
            f"only {len(documented)} documented functions in {library}, Python's own library: "
            "use --train-file and --eval-file"
        )
    train, held_out = split(documented)
    unseen, names = {module(pair) for pair in held_out}, []
    for text, _, name in pairs:
        pair = Pair("\n".join(text.split("\n")[:2]), re.split(r"[.:]", name)[-1].strip("_"), name)
        if re.search(r"[a-z0-9](_[^_]|[A-Z])", pair.summary) and module(pair) not in unseen:
            names.append(pair)
    return train, held_out, names


def pairs_in(path: Path, name: str) -> Iterator[Pair]:
    """Each function with the first line of its docstring, "" if it has none that is a sentence."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # the library has some that are broken on purpose
    lines = source.split("\n")  # as ast counts; splitlines() would also split at form feeds
    for node, qualified in functions(tree):
        # Line slices: ast.get_source_segment() splits the file anew for each function.
        code, summary = lines[node.lineno - 1 : node.end_lineno], ""
        if docstring := ast.get_docstring(node):
            doc, *body = node.body
            before = lines[doc.lineno - 1][: doc.col_offset]
            if before.strip() or not body or body[0].lineno <= doc.end_lineno:
                continue  # nothing but a docstring, or it shares a line with code
            code = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
            summary = first_sentence(docstring)
        yield Pair("\n".join(code), summary, f"{name}:{qualified}")


def first_sentence(docstring: str) -> str:
    """The first line, if it is a sentence of 3 to 16 words and no example; otherwise ""."""
    first, _, rest = docstring.partition("\n")
    whole = first.endswith(".") or not rest.split("\n")[0].strip()  # not cut in mid-sentence
    fits = whole and 3 <= len(first.split()) <= 16 and first.isascii() and ">>>" not in first
    return first if fits else ""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Each function in `tree`, methods and inner functions too, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, HOLDS_STATEMENTS):
            continue
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                yield node, name
        yield from functions(node, name)


def split(pairs: list[Pair], part: float = 0.08) -> tuple[list[Pair], list[Pair]]:
    """(train, eval): about `part` of the pairs, whole modules and packages, are kept for eval.

    A checksum of the names chooses them: the same on every machine. Large packages stay in train. A
    function of eval that resembles one of the same name in train (the library has copies:
    datetime.py and _pydatetime.py) is left out.
    """
    sizes = Counter(map(module, pairs))
    chosen, count = set(), 0
    for candidate in sorted(sizes, key=lambda name: zlib.crc32(name.encode())):
        if count < part * len(pairs) and sizes[candidate] < 0.02 * len(pairs):
            chosen.add(candidate)
            count += sizes[candidate]
    train = [pair for pair in pairs if module(pair) not in chosen]
    same_name = defaultdict(list)
    for pair in train:
        same_name[pair.name.rpartition(".")[2]].append(set(re.findall(r"\w+", pair.text)))

    def copied(pair: Pair) -> bool:
        words = set(re.findall(r"\w+", pair.text))
        others = same_name[pair.name.rpartition(".")[2]]
        return any(len(words & other) > 0.6 * len(words | other) for other in others)

    kept = [pair for pair in pairs if module(pair) in chosen and not copied(pair)]
    # In an order without meaning, so that the first hundred speak for all of them.
    return train, sorted(kept, key=lambda pair: zlib.crc32(pair.name.encode()))


def module(pair: Pair) -> str:
    return re.split(r"[/.]", pair.name)[0].lstrip("_")


def read_json_lines(path: Path) -> list[Pair]:
    """Pairs from a file of {"text": ..., "summary": ...}, one a line.

    Raises `UserError` that names the file and each bad line: none is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"{path} cannot be read: {reason}") from None
    if lines[-1] == "":
        lines.pop()  # what follows the last line's end
    pairs, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            pairs.append(Pair(*checked(line), f"{path.name}:{number}"))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UserError(f"{path} has {len(bad)} bad line(s): {'; '.join(bad[:5])}{more}")
    if not pairs:
        raise UserError(f'{path} is empty: expected lines of {{"text": ..., "summary": ...}}')
    return pairs


def checked(line: str) -> tuple[str, str]:
    """The text and the summary in one JSON line. Raises `ValueError` that says what is wrong."""
    try:
        value = json.loads(line)
    except ValueError as error:
        reason = str(error) if line.strip() else "it is blank"
        raise ValueError(f"no JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    for key in ("text", "summary"):
        if key not in value:
            raise ValueError(f'no "{key}"')
        if not isinstance(value[key], str) or not value[key].strip():
            raise ValueError(f'"{key}" is not a text')
    return value["text"], value["summary"]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of word pieces from `texts`; the same texts give the same vocabulary.

    getDefaultTimeout and get_default_timeout are both cut into "get default timeout", in lower
    case: the words of a function's name are then the very tokens that its docstring begins with,
    which a model can learn to copy. Each word starts with a mark, also after a bracket or a dot.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex("(?<=[a-z0-9])(?=[A-Z])"), " "),
            normalizers.Replace("_", " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),  # cuts at spaces and around punctuation
            pre_tokenizers.Metaspace(prepend_scheme="always"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Metaspace(prepend_scheme="always"),
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[.,:;?!)])"), ""),  # no space before a full stop
        ]
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
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer, pairs: list[Pair], max_source: int, max_target: int, prefix: str = ""
) -> list[Sample]:
    """Token ids of each pair, `prefix` put before the text; what is longer is cut."""
    if not pairs:
        return []  # the tokenizer cannot take nothing
    parts = [
        tokenizer(texts, max_length=longest, truncation=True)["input_ids"]
        for texts, longest in (
            ([prefix + pair.text for pair in pairs], max_source),
            ([pair.summary for pair in pairs], max_target),
        )
    ]
    return [Sample(*both) for both in zip(*parts, strict=True)]


def epoch_batches(samples: list[Sample], batch_size: int, seed: int) -> list[list[int]]:
    """The global batches of one epoch, as indices: the same list on every rank that calls this.

    Samples of similar length share a batch, or most of it would be padding; otherwise the order is
    random. All batches are full: up to batch_size - 1 samples are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    batches, pool = [], 20 * batch_size
    for start in range(0, len(order), pool):
        # Sorted, so that also the ranks' shares of a batch, every N-th, are equally long.
        some = sorted(order[start : start + pool], key=lambda i: len(samples[i].source))
        full = len(some) // batch_size * batch_size
        batches += [some[i : i + batch_size] for i in range(0, full, batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def equal_shares(samples: list, batch_size: int, worker: Worker) -> list[tuple[list, int]]:
    """This rank's part of `samples`, in batches: (batch, how many of it count).

    All ranks get equally many batches, though the samples may not divide: with sharded parameters
    every forward pass is a collective. Where nothing is left, sample 0 runs and does not count.
    """
    mine = samples[worker.rank :: worker.world_size]
    longest = -(-len(samples) // worker.world_size)  # rank 0's part
    batches = [mine[i : i + batch_size] for i in range(0, longest, batch_size)]
    return [(batch or samples[:1], len(batch)) for batch in batches]


def collate(samples: list[Sample], pad: int, device) -> tuple[torch.Tensor, ...]:
    """(source, mask of its tokens, target), each (batch, longest) int64; padding as T5 wants it."""

    def stack(rows: list[list[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [filler] * (longest - len(row)) for row in rows], device=device)

    source = stack([s.source for s in samples], pad)
    mask = stack([[1] * len(s.source) for s in samples], 0)
    return source, mask, stack([s.target for s in samples], IGNORED)
