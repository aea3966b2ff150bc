"""transformer_basics/tokenizing.py with a tokenizer like that of Llama 2: a token begins each text,
a blank is put before it, and the ids have gaps."""

import string

import numpy as np
import pytest
from arguments import UserError
from chat import tokens_of_chat
from hugging_face import their_config
from model import GPTConfig
from tokenizing import ids, load_tokenizer

BEGIN, END, BLANK = 1, 2, "\u2581"
CHARACTERS = {c: 10 + i for i, c in enumerate(BLANK + string.ascii_letters + "[]/!?")}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == "user" %}\
[I] {{ m.content }} [/I]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
CHAT = [("user", "Hi"), ("assistant", "Yo!"), ("user", "And"), ("assistant", "No")]


def save(folder, **characters: int) -> str:
    from tokenizers import Tokenizer, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": BEGIN, "</s>": END} | CHARACTERS | characters
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    blanks = [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    made.normalizer = normalizers.Sequence(blanks)
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BEGIN)])
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, **options)
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(folder)
    return str(folder)


def of(text: str) -> list[int]:
    return [CHARACTERS[c] for c in text.replace(" ", BLANK)]


def test_a_document_begins_and_ends_with_a_token(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path))
    assert ids(b"Hi", tokenizer).tolist() == [BEGIN, *of(" Hi"), END]
    assert tokenizer.of_prompt("Hi") == [BEGIN, *of(" Hi")]
    assert ids(b"", tokenizer).tolist()[0] == BEGIN


def test_the_exported_model_names_both(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path))
    config = GPTConfig(vocab_size=64, block_size=8, layers=1, heads=2, dim=8)
    theirs = their_config(config, tokenizer.end, tokenizer.begin)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (BEGIN, END)
    assert their_config(config, END).bos_token_id == END


def test_answers_have_the_tokens_of_the_whole_chat(tmp_path):
    """Tokenised apart, each answer would begin with a second blank, which the loss would count."""
    chat = [{"role": role, "content": content} for role, content in CHAT]
    tokens, counts = tokens_of_chat(chat, load_tokenizer(save(tmp_path)), "here")
    expected = [(BEGIN, 0)]
    for question, answer in (("[I] Hi [/I]", " Yo!"), ("[I] And [/I]", " No")):
        expected += [(t, 0) for t in of(" " + question)]  # a blank behind <s> and </s>
        expected += [(t, 1) for t in [*of(answer), END]]
    assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected


def test_ids_with_gaps_fit_the_embedding(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, z=70_000))
    assert tokenizer.token_count == 70_001
    assert ids(b"z", tokenizer).tolist() == [BEGIN, *of(" "), 70_000, END]
    assert ids(b"z", tokenizer).dtype == np.uint32


def test_a_broken_tokenizer_is_one_sentence(tmp_path):
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(UserError, match=f"cannot load --tokenizer {tmp_path}: "):
        load_tokenizer(str(tmp_path))


def test_a_prompt_without_tokens_is_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.begin is None
    assert ids(b"a", tokenizer).tolist() == [0, 1]
    with pytest.raises(UserError, match="--prompt '  ' has no tokens: give more text"):
        tokenizer.of_prompt("  ")


def test_half_a_pair_of_surrogates_is_replaced(tmp_path):
    from chat import messages_in

    line = rb'{"messages": [{"role": "user", "content": "hi \ud83d"}, '
    line += rb'{"role": "assistant", "content": "\ud83d\ude00"}]}'
    contents = [message["content"] for message in messages_in(line, "here")]
    assert contents == ["hi ?", "\U0001f600"]


def test_a_token_that_is_no_byte_is_a_question_mark():
    """With --init-from and without --tokenizer the model may draw one: the last step was for it."""
    assert load_tokenizer(None).decode([65, 256, 66, 50_256]) == "A?B?"
