"""What the user names: a model, a cluster, a batch. Every mistake is one sentence."""

import difflib
import json
import math
import re
import tomllib
from pathlib import Path

from shapes import Cluster, Model
from stacks import Stack, load

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
# Families of Hugging Face's transformers that the formulas describe: gated (SwiGLU, three matrices
# of the MLP) or not, and whether the output layer is the embedding where the config does not say.
GATED = dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "phi3", "stablelm"], 0)
GATED |= dict.fromkeys(["olmo", "olmo2", "granite"], 0)
GATED |= dict.fromkeys(["gemma", "gemma2", "gemma3_text", "cohere", "smollm3"], 1)
PLAIN = dict.fromkeys(["gpt2", "bloom", "opt", "gpt_bigcode", "falcon", "mpt", "starcoder2"], 1)
PLAIN |= dict.fromkeys(["gpt_neox", "gptj", "codegen", "phi", "nemotron"], 0)
LARGEST = 10**9  # of a size: what is above is a mistake
NO_LINKS = {"nvlink_gb_s": math.inf, "nic_gb_s": math.inf}  # not measured: see `links`


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
    if value > 1e15:
        raise UserError(f"{text!r:.20} is above 10^15")
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
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--model {path} is no config.json of a decoder: {error}") from None


def has_experts(config: object) -> bool:
    """Whether a config, or a part of it, names a number of experts."""
    if not isinstance(config, dict):
        return False
    named = any("experts" in key and value for key, value in config.items())
    return named or any(map(has_experts, config.values()))


def from_hugging_face(config: dict) -> Model:
    """The shape of a decoder of Hugging Face's transformers. Raises ValueError: something else."""
    if not isinstance(config, dict):
        raise ValueError("it is no table of keys")
    if has_experts(config):
        raise ValueError("it has experts, which the formulas do not know")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in GATED | PLAIN:
        raise ValueError(f"its model_type is {family!r}, not one of: {', '.join(GATED | PLAIN)}")

    def size(name: str, *keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if value is None:
            raise ValueError(f"it lacks {keys[0]}")
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise ValueError(f"{name} is {value!r:.20}")
        return value

    width = size("width", "hidden_size", "n_embd", "d_model")
    heads = size("heads", "num_attention_heads", "n_head", "n_heads")
    if config.get("head_dim") is None and width % heads:
        raise ValueError(f"{heads} heads do not divide its width {width}")
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if one else size("kv_heads", "num_key_value_heads", "num_kv_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} heads of keys do not divide its {heads} heads")
    tied = config.get("tie_word_embeddings")
    if tied not in (None, False, True):
        raise ValueError(f"tie_word_embeddings is {tied!r:.20}")
    ratio = size("expansion_ratio", "expansion_ratio", default=4)
    ffn = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return Model(
        layers=size("layers", "num_hidden_layers", "n_layer", "n_layers"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", "head_dim", default=width // heads),
        ffn=size("ffn", *ffn, default=ratio * width),
        gated=int(family in GATED),
        vocab=size("vocab", "vocab_size"),
        tied=int((GATED | PLAIN)[family] if tied is None else tied),
    )


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
    if not isinstance(own or {}, dict):
        raise UserError(f"--gpu {name}: constants is {own!r:.20}, not a table")
    for part, values in (("", table), ("constants: ", own or {})):
        for key, value in values.items():
            least = 0 if part or key == "fp8" else None  # None: above 0
            if not is_number(value, least):
                wanted = "above 0" if least is None else "of 0 or more"
                raise UserError(f"--gpu {name}: {part}{key} is {value!r:.20}, no number {wanted}")
    try:
        found = Cluster(**NO_LINKS | table)
        own = Stack(**own) if own else None
    except TypeError as error:
        wrong = str(error).partition("() ")[2] or error
        raise UserError(f"--gpu {name}: {wrong}; presets.toml shows the keys") from None
    if found.gpus_per_node % 1:
        raise UserError(f"--gpu {name}: gpus_per_node is {found.gpus_per_node}, not whole")
    if own and not (own.gemm_efficiency and own.attention_cost and own.fp8_speed):
        raise UserError(f"--gpu {name}: constants: an efficiency or a speed is 0")
    if not isinstance(stack, str):
        raise UserError(f"--gpu {name}: stack is {stack!r:.20}, not the name of one")
    return found, stack, own


def is_number(value: object, least: float | None = None) -> bool:
    """Whether a value of a TOML file is a finite number of at least `least`; None: above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 if least is None else value >= least


def links(cluster: Cluster, gpus: int, name: str) -> None:
    """Raises UserError: a link that these GPUs need was not measured."""
    for key, most in (("nvlink_gb_s", 1), ("nic_gb_s", cluster.gpus_per_node)):
        if gpus > most and getattr(cluster, key) == math.inf:
            raise UserError(f"--gpu {name} has no {key}, which more than {most} GPUs need: add it")


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
