"""All that you replace to fine-tune a model of another kind: its class, its units, its loss.

For a decoder such as Llama: another MODEL and `new_config`, the blocks of one stack, and in
`collate` one row of text and summary, in which only the summary has labels.
"""

import torch.nn.functional as F
from data import IGNORED, Pair
from torch import Tensor, nn
from transformers import PreTrainedConfig, T5Config, T5ForConditionalGeneration

MODEL = T5ForConditionalGeneration  # has from_pretrained() and generate()
MODEL_TYPE = "t5"  # what the configuration of --model must say

# The likeliest token each time, those that were written already made less likely: a model that has
# learnt little falls into loops, "the current current current". The penalty is that of Keskar et
# al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019.
SEARCH = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.5}


def new_config(settings, tokenizer) -> PreTrainedConfig:
    """Of a small model that is yet to learn everything: without --model."""
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
    """What is gathered together for its forward and backward, in the order of use: the blocks.

    What is left is the root's, with the matrix that is both embeddings and the output. It cannot be
    a unit of its own, nor part of the encoder's or the decoder's: a unit has its parameters for its
    own forward pass only, and this one is used in all of them.
    """
    return [*model.encoder.block, *model.decoder.block]


def lr_factor(name: str) -> float:
    """What the learning rate of a new model's parameter is multiplied by.

    AdamW moves every number by about lr. A new T5's embeddings are ten times larger than its
    matrices, and its position biases must grow to several times that: with one rate for all, it
    takes thousands of steps to begin copying words. (Adafactor, which T5 was made with, takes steps
    in proportion.) A trained T5 has all that behind it.
    """
    factors = {"shared.weight": 5.0, "relative_attention_bias.weight": 10.0}
    return factors.get(".".join(name.split(".")[-2:]), 1.0)


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


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of the losses, how many they are) of all target tokens of a batch."""
    labels = batch["labels"]
    logits = model(
        batch["input_ids"],
        batch["attention_mask"],
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),  # the tokens before
        use_cache=False,
    ).logits
    loss_sum = F.cross_entropy(  # in float32, whatever the matrices multiplied in
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss_sum, (labels != IGNORED).sum()


def generate_texts(
    model: nn.Module, batch: dict[str, Tensor], tokenizer, longest: int, synced: bool
) -> list[str]:
    """A summary of each text of the batch, of at most `longest` tokens.

    synced: each token is a forward pass, which is a collective: a rank that is ready runs on until
        all ranks are.
    """
    tokens = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=longest,
        synced_gpus=synced,
        **SEARCH,
    )
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)
