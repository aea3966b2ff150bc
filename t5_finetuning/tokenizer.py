"""Train a tokenizer for a new T5; a model from the hub has its own."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHARACTERS = 200  # that the vocabulary has, at most: a text's others are unknown to it


def train_tokenizer(texts: Callable[[], Iterable[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of word pieces; the same texts give the same vocabulary.

    texts: returns all texts. It is called twice.

    getDefaultTimeout and get_default_timeout both become "get default timeout", in lower case. The
    words of a function's name are then the same tokens as in its docstring, and a model can learn
    to copy them.
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
    # BpeTrainer keeps these. Of characters that are equally frequent it would keep any.
    seen = Counter()
    for text in texts():
        seen.update(tokenizer.normalizer.normalize_str(text).replace(" ", mark.replacement))
    alphabet = sorted(seen, key=lambda character: (-seen[character], character))[:CHARACTERS]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],  # 0 and 1 as in T5
        initial_alphabet=alphabet,
        limit_alphabet=CHARACTERS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def vocabulary_sum(tokenizer) -> int:
    """A number that differs between two vocabularies, or two ways to number them."""
    return zlib.crc32(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
