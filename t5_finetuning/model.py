"""A T5 of the Hugging Face hub, or a small new one: sharded, filled, saved in their format."""

import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import UserError
from data import Pair, train_tokenizer
from runtime import Worker
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)  # fmt: skip
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)  # fmt: skip
from transformers import AutoConfig, AutoTokenizer, T5Config, T5ForConditionalGeneration


def on_rank_0(action: Callable[[], object], worker: Worker) -> object:
    """What `action()` returns on rank 0, on every rank; a `UserError` there is raised on all."""
    box = [None]
    if worker.is_main:
        try:
            box[0] = action()
        except UserError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]


def prepare(args, train_pairs: list[Pair]) -> tuple[T5Config, object]:
    """(config, tokenizer): of --model, or of a small T5 that is yet to learn everything."""
    if args.model:
        config = from_hub(AutoConfig, args.model)
        if config.model_type != "t5":
            raise UserError(f"--model {args.model} is of type {config.model_type}, not t5")
        config.dropout_rate = args.dropout
        return config, from_hub(AutoTokenizer, args.model)
    texts = [text for pair in train_pairs for text in (pair.text, pair.summary)]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=args.dim,
        d_kv=32,
        d_ff=4 * args.dim,
        num_heads=args.dim // 32,
        num_layers=args.layers,
        dropout_rate=args.dropout,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return config, tokenizer


def from_hub(kind: type, name: str, **options):
    """`kind`.from_pretrained(name). Raises `UserError` with one sentence, whatever goes wrong."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        what = kind.__name__.removeprefix("Auto").removeprefix("T5For")
        raise UserError(
            f"--model {name}: no {what} to be had ({type(error).__name__}): it must be the id of a "
            "T5 on the Hugging Face hub, with a network or downloaded before, or a local directory"
        ) from None


def make_sharded_model(config: T5Config, args, worker: Worker) -> T5ForConditionalGeneration:
    """A sharded T5 with the weights of --model, or with random ones."""
    with torch.device("meta"):  # shapes without memory
        model = T5ForConditionalGeneration(config)
    if args.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    shard(model, mesh, torch.bfloat16 if args.precision == "bf16" else None)
    model.to_empty(device=worker.device)  # memory for this rank's shards
    # T5 has one matrix in four places: `shared`, both embeddings, the output. to_empty() makes four
    # of it in a plain model. A sharded one keeps it whole (torch 2.13): this line makes sure.
    model.tie_weights()

    def whole() -> T5ForConditionalGeneration:
        torch.manual_seed(args.seed)
        if args.model:
            return from_hub(T5ForConditionalGeneration, args.model, dtype=torch.float32)
        return T5ForConditionalGeneration(config)

    fill(model, whole, worker)
    # generate() calls the encoder, past the model's forward() at which the root's parameters are
    # gathered: told so, FSDP gathers them for generate() too.
    register_fsdp_forward_method(model, "generate")
    return model


def shard(model: T5ForConditionalGeneration, mesh, compute_dtype: torch.dtype | None) -> None:
    """Each block is a unit; what is left, with the shared embedding, is the root's.

    The shared matrix cannot be a unit of its own, nor part of the encoder's or the decoder's: a
    unit has its parameters for its own forward only, and this matrix is used in all of them.
    """
    # Gradients are added up, and parameters kept, in float32.
    dtypes = {"param_dtype": compute_dtype, "reduce_dtype": torch.float32}
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    last = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)  # logits, for the loss
    fully_shard(model, mesh=mesh, mp_policy=last)
    # True of the position biases that T5's blocks hand on. Nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def fill(model, whole: Callable[[], T5ForConditionalGeneration], worker: Worker) -> None:
    """Give the sharded model the values of `whole()`. Rank 0 alone calls it; all get their shards.

    Rank 0 holds the whole model for a moment, in CPU memory; no other rank ever does.
    """
    values = {}
    on_rank_0(lambda: values.update(whole().state_dict()), worker)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)


def export(model, config: T5Config, tokenizer, folder: Path, worker: Worker) -> None:
    """Save the sharded model as `folder`, for from_pretrained(); all ranks call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(model, options=options)  # whole on rank 0, empty on the others

    def write() -> None:
        with torch.device("meta"):  # a plain model around the values: no second copy
            plain = T5ForConditionalGeneration(config)
        plain.load_state_dict(values, assign=True)
        plain.tie_weights()  # assign=True has made four matrices of one
        temporary, old = folder.with_name("model.tmp"), folder.with_name("model.old")
        try:
            for part in (plain, tokenizer):
                part.save_pretrained(temporary)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}") from None

    on_rank_0(write, worker)


@contextmanager
def gathered(model):
    """Inside, what is gathered stays so: once for a whole summary instead of once for each token.

    It costs each rank the memory of the whole model, in --precision. Leave it out for a model that
    fits no single device: generate() then works as well, slowly.
    """
    model.set_reshard_after_forward(False)
    yield
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the root: used first thing in backward
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # or the next forward would still see today's values
