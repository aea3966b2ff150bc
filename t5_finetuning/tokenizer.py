"""Train a tokenizer for a new T5; a model from the hub has its own."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of word pieces from `texts`; the same texts give the same vocabulary.

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
