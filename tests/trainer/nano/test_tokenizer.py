import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from populora_trainer.nano.model import qwen2_config
from populora_trainer.nano.tokenizer import Lexer, build_tokenizer, save_tokenizer, vocabulary
from populora_trainer.tasks.compact import EOS, PAD, SPECIAL_TOKENS, UNKNOWN

TOKENIZER = build_tokenizer()
printable = st.text(st.sampled_from([*map(chr, range(32, 127)), "\n", "\t"]), max_size=80)
code = st.lists(st.sampled_from(vocabulary()), max_size=30).map("".join)


@given(printable)
def test_printable_text_survives_a_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.unk_token_id not in ids or UNKNOWN in text


@given(printable | code)
def test_the_corpus_lexer_gives_the_same_ids(text):
    assert Lexer().encode(text) == TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("number", range(100))
def test_every_integer_below_a_hundred_is_one_token(number):
    assert len(TOKENIZER.encode(str(number), add_special_tokens=False)) == 1
    assert len(TOKENIZER.encode(f"x + {number}", add_special_tokens=False)) == 3


def test_special_tokens_are_one_token_each():
    assert [TOKENIZER.encode(token, add_special_tokens=False) for token in SPECIAL_TOKENS] == [
        [index] for index in range(len(SPECIAL_TOKENS))
    ]
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (EOS, PAD)


def test_what_the_vocabulary_lacks_is_left_out():
    assert TOKENIZER.decode(TOKENIZER.encode("xé日y", add_special_tokens=False), skip_special_tokens=False) == "xy"


def test_a_saved_tokenizer_loads_unchanged(tmp_path):
    save_tokenizer(tmp_path)
    qwen2_config().save_pretrained(tmp_path)  # AutoTokenizer chooses its class by the model's type
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<po>def f(x):\n    return x + 12<new>"
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.encode(text, add_special_tokens=False) == Lexer().encode(text)
    assert loaded.decode(loaded.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
