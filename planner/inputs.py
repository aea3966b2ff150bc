"""What the user names: a model, a cluster, a batch. Every mistake is one sentence."""

import difflib
import json
import re
import tomllib
from pathlib import Path

from shapes import Cluster, Model
from stacks import Stack, load

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
GELU = {"gpt2", "gpt_neox", "bloom", "opt", "gptj", "falcon", "mpt", "gpt_bigcode"}  # two matrices


class UserError(ValueError):
    """A mistake of the user, reported as one sentence without a traceback."""


def nearest(name: str, names) -> str:
    """The names that exist, the one most like `name` first."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0)
    rest = sorted(set(names) - set(close))
    return ", ".join([*close, *rest])


def count(text: str) -> int:
    """A number such as 512, 64K, 4M: K is 1,024 and M 1,048,576."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if not found:
        raise UserError(f"{text!r} is no count: write 4096, 64K or 4M")
    value = float(found[1]) * SUFFIXES[found[2]]
    if value < 1 or value != int(value):
        raise UserError(f"{text!r} is {value:g}, not a whole number above 0")
    return int(value)


def model(name: str) -> Model:
    """A preset, or the config.json of a Hugging Face model."""
    if name in PRESETS["models"]:
        return Model(**PRESETS["models"][name])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        names = nearest(name, PRESETS["models"])
        raise UserError(f"--model {name} is neither a file nor one of: {names}")
    try:
        return from_hugging_face(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--model {path} is no config.json of a decoder: {error}") from None


def from_hugging_face(config: dict) -> Model:
    """The shape of a decoder of Hugging Face's transformers. Raises ValueError: something else."""

    def first(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        if default is None:
            raise ValueError(f"it lacks {keys[0]}")
        return default

    if (
        config.get("num_experts")
        or config.get("n_routed_experts")
        or config.get("num_local_experts")
    ):
        raise ValueError("it has experts, which the formulas do not know")
    width = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head", "n_heads")
    shape = Model(
        layers=first("num_hidden_layers", "n_layer", "n_layers"),
        width=width,
        heads=heads,
        kv_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=width // heads),
        ffn=first("intermediate_size", "n_inner", "ffn_dim", default=4 * width),
        gated=int(config.get("model_type") not in GELU),
        vocab=first("vocab_size"),
        tied=int(config.get("tie_word_embeddings", True)),
    )
    for key, value in vars(shape).items():
        if not isinstance(value, int) or value < (0 if key in ("gated", "tied") else 1):
            raise ValueError(f"{key} is {value!r}")
    return shape


def cluster(name: str) -> tuple[Cluster, str, Stack | None]:
    """A preset or a TOML file: the cluster, the name of its stack, its own stack if it has one."""
    table = PRESETS["clusters"].get(name)
    if table is None:
        path = Path(name)
        if not path.exists():
            names = nearest(name, PRESETS["clusters"])
            raise UserError(f"--gpu {name} is neither a file nor one of: {names}")
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--gpu {path} cannot be read: {error}") from None
    table = dict(table)
    stack, own = table.pop("stack", "generic"), table.pop("constants", None)
    try:
        found = Cluster(**table)
        own = Stack(**own) if own else None
    except TypeError as error:
        wrong = str(error).partition("() ")[2]
        raise UserError(f"--gpu {name}: {wrong}; presets.toml shows the keys") from None
    for key, value in vars(found).items():
        if not isinstance(value, int | float) or value <= 0:
            raise UserError(f"--gpu {name}: {key} is {value!r}, not a number above 0")
    return found, stack, own


def stack(name: str) -> tuple[Stack, dict]:
    """The constants of a software, by name, and what is known of where they come from."""
    stacks = load()
    if name not in stacks:
        raise UserError(f"--stack {name} is not one of: {nearest(name, stacks)}")
    return stacks[name]


def sequences(batch_tokens: int, sequence: int) -> int:
    """Sequences of a global batch."""
    if batch_tokens % sequence:
        below = max(1, batch_tokens // sequence) * sequence
        raise UserError(
            f"--batch-tokens {batch_tokens} is no multiple of --sequence {sequence}: "
            f"the nearest that works is {below}"
        )
    return batch_tokens // sequence
