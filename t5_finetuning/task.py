"""The one file that you replace for a model of another kind: its class, FSDP units, loss.

For a decoder such as Llama, change all of it: `collate` joins text and summary into one row, with
labels for the summary only; `compute_loss` shifts the labels by one token, and passes the model's
own 2-D mask; `generate_texts` gets texts without summaries, padded on the left, and cuts them off.
fsdp_basics/examples/llama.py is nearer to that, if nothing has to be generated.
"""

import torch
import torch.nn.functional as F
from data import IGNORED, Pair
from torch import Tensor, nn
from transformers import PreTrainedConfig, T5Config, T5ForConditionalGeneration

MODEL = T5ForConditionalGeneration  # has from_pretrained() and generate()
MODEL_TYPE = "t5"  # what the configuration of --model must say
DROPOUT = "dropout_rate"  # the name of --dropout in this configuration; Bart's is "dropout"

# Greedy search with a penalty on tokens that are already written: a model that has learnt little
# repeats itself, "the current current current". The penalty is that of Keskar et al., "CTRL: A
# Conditional Transformer Language Model for Controllable Generation", 2019.
SEARCH = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.5}


def new_config(settings, tokenizer) -> PreTrainedConfig:
    """The configuration of a new small model, for runs without --model."""
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=settings.dim,
        d_kv=32,
        d_ff=4 * settings.dim,
        num_heads=settings.dim // 32,
        num_layers=settings.layers,
        dropout_rate=settings.dropout,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )


def units(model: nn.Module) -> list[nn.Module]:
    """The FSDP units, in the order of use: each block is gathered for its forward and backward.

    The root has all other parameters, with the matrix of both embeddings and the output layer. This
    matrix cannot be a unit of its own, or a part of the encoder's or the decoder's unit: a unit has
    its parameters only during its own forward pass, and all of these passes use the matrix.
    """
    return [*model.encoder.block, *model.decoder.block]


def lr_factor(name: str) -> float:
    """The factor on the learning rate of a new model's parameter.

    AdamW moves every number by about lr. A new T5's embeddings are ten times larger than its
    matrices, and its position biases must grow to several times that. With one rate for all
    parameters, it needs thousands of steps to begin copying words. (Adafactor, which trained T5,
    takes steps in proportion to the numbers.) A trained T5 needs no factors.
    """
    factors = {"shared.weight": 5.0, "relative_attention_bias.weight": 10.0}
    return factors.get(".".join(name.split(".")[-2:]), 1.0)


def collate(pairs: list[Pair], tokenizer, settings) -> dict[str, Tensor]:
    """input_ids, attention_mask and labels, each (batch, longest) int64; longer texts are cut."""
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


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of the losses, number of losses) of all target tokens of a batch."""
    labels = batch["labels"]
    logits = model(
        batch["input_ids"],
        additive_mask(batch["attention_mask"]),
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),  # the tokens before
        use_cache=False,
    ).logits
    loss_sum = F.cross_entropy(  # in float32 for every --precision
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss_sum, (labels != IGNORED).sum()


def additive_mask(mask: Tensor) -> Tensor:
    """(batch, tokens) of 1 and 0 (padding) -> (batch, 1, 1, tokens), what attention adds: 0, -1e30.

    transformers takes a mask of four dimensions as it is. Of two dimensions it asks whether all are
    ones, and this question waits for the GPU: seen on an H100, transformers 5.17 and 5.23.
    """
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -1e30)[:, None, None]


def generate_texts(
    model: nn.Module, batch: dict[str, Tensor], tokenizer, longest: int, synced: bool
) -> list[str]:
    """A summary of each text of the batch, of at most `longest` tokens.

    synced: a rank that has finished keeps running until all ranks have. Each token is a forward
        pass, which is a collective.
    """
    tokens = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=longest,
        synced_gpus=synced,
        **SEARCH,
    )
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)
