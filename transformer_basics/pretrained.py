"""Start from pretrained weights in Hugging Face's format: GPT-2, Llama, Mistral, SmolLM2, Qwen."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import UserError
from config import SHAPE, Settings
from hugging_face import from_hugging_face, shape_of, their_name
from lora import FACTORS
from model import GPT, GPTConfig
from safetensors import SafetensorError, safe_open
from tiles import indices_here, local_part
from torch import Tensor


def read_config(settings: Settings, token_count: int) -> GPTConfig:
    """The sizes of the model that --init-from names.

    token_count: tokens of the training text are below this number.
    Raises `UserError` if our model does not compute what it computes, and if its sizes are not
    those of the flags.
    """
    from transformers import AutoConfig

    name = settings.init_from
    theirs = loaded(name, AutoConfig.from_pretrained)
    try:
        shape = shape_of(theirs)
    except UserError as error:
        raise UserError(f"--init-from {name} {error}") from None
    check_sizes(name, shape, settings)
    if token_count > theirs.vocab_size:
        raise UserError(
            f"--init-from {name} knows {theirs.vocab_size} tokens, the text has {token_count}: "
            f"give --tokenizer {name}"
        )
    return settings.padded_model(theirs.vocab_size)


def loaded(name: str, load: Callable):
    try:
        return load(name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load --init-from {name}: {reason}") from None


def check_sizes(name: str, shape: dict, settings: Settings) -> None:
    """Raises `UserError` with the flags that fit the weights."""
    longest, is_tied = shape["block_size"], shape["tied"]
    fitting = GPTConfig(**shape | {"block_size": min(settings.block_size, longest)})
    ours, fitting = vars(settings.model(1)), vars(fitting)
    if any(ours[key] != fitting[key] for key in SHAPE if key != "tied"):
        sizes = ("layers", "heads", "dim", "block_size")
        usual = vars(GPTConfig(**{key: fitting[key] for key in sizes}))
        others = [key for key in SHAPE if key not in (*sizes, "tied")]
        # --preset may have set our value: then name the flag even if the default would fit.
        flags = [key for key in others if not ours[key] == fitting[key] == usual[key]]
        absent = [flag_of(key) for key in flags if fitting[key] is None]
        said = [flag_of(key, fitting[key]) for key in (*sizes, *flags) if fitting[key] is not None]
        message = f"--init-from {name} has other sizes: it fits {' '.join(said)}"
        if absent:  # no value of such a flag says so
            message += f"; leave out {' and '.join(absent)}, or the --preset that sets it"
        raise UserError(message)
    if settings.tied and not is_tied:
        raise UserError(f"--init-from {name} has a head of its own: give --no-tied")


def flag_of(key: str, value=()) -> str:
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-")
    values = value if isinstance(value, tuple) else [value]
    return " ".join([flag, *map(str, values)])


def read_weights(settings: Settings, config: GPTConfig) -> "Weights":
    """The weights of the --init-from model under our names, for `copy_weights`."""
    name = settings.init_from
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        files = ["*.safetensors", "*.safetensors.index.json"]
        folder = Path(loaded(name, lambda name: snapshot_download(name, allow_patterns=files)))
    return loaded(name, lambda _: Weights(folder, config))


class Weights:
    """Our name -> a full weight of a folder's safetensors, mapped into memory.

    A copy of a part of a weight reads only that part from the disk.
    """

    def __init__(self, folder: Path, config: GPTConfig):
        """Raises OSError if the folder has no safetensors."""
        self.folder, self.config, self.file_of = folder, config, {}
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        for name in names:
            file = safe_open(folder / name, framework="pt")
            self.file_of |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        return from_hugging_face(name, self.read, self.config)

    def read(self, name: str) -> Tensor:
        """Raises `UserError` if it is missing."""
        embedding = their_name("token_embedding.weight", self.config)
        # A tied head has no entry. The files of GPT-2 itself leave out the first word.
        others = [name, name.removeprefix("transformer.")]
        if name == "lm_head.weight":
            others += [embedding, embedding.removeprefix("transformer.")]
        for other in others:
            if other in self.file_of:
                return self.file_of[other].get_tensor(other)
        raise UserError(f"--init-from {self.folder} has no weight {name}")

    def check_names(self) -> None:
        """Raises `UserError` if the files hold a weight that no pipeline stage reads."""
        with torch.device("meta"):
            ours = GPT(self.config).state_dict()
        read = {their_name(name, self.config) for name in ours}
        read |= {name.removeprefix("transformer.") for name in read}
        for name in self.file_of:
            is_mask = not self.config.is_llama and name.endswith(".attn.bias")  # of old GPT-2 files
            if name.endswith((".weight", ".bias")) and name not in read and not is_mask:
                raise UserError(
                    f"--init-from {self.folder} has {name}, this GPT has no such weight: "
                    "give a folder whose weights fit its config.json"
                )


@torch.no_grad()
def copy_weights(model: GPT, weights: Weights) -> None:
    """Each rank copies its shards from the files: none holds a full weight of a sharded model.

    Rows that pad the vocabulary are 0: the files do not have them. Adapters stay as they are.
    Raises `UserError` if the files have another weight, or one of another shape.
    """
    weights.check_names()
    for name, parameter in model.named_parameters():
        if name.endswith(FACTORS):
            continue
        here = [indices_here(parameter, dim) for dim in range(parameter.dim())]
        full, expected = weights[name], list(parameter.shape)
        if name in ("token_embedding.weight", "head.weight"):
            expected[0] = model.config.token_count or expected[0]
        if list(full.shape) != expected:
            raise UserError(
                f"--init-from {weights.folder} has {their_name(name, model.config)} for our {name} "
                f"with the shape {list(full.shape)}, not {expected}: "
                "give a folder whose weights fit its config.json"
            )
        part = full[tuple(slice(indices.start, indices.stop) for indices in here)]
        local = local_part(parameter)
        local[: len(part)] = part
        local[len(part) :] = 0
