from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.data import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert TOKENIZER.decode(ids) == text


@given(st.text(st.characters(codec="utf-8")))
def test_tokens_are_the_utf8_bytes(text):
    assert bytes(TOKENIZER.encode(text)) == text.encode("utf-8")


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_whatever_a_model_generates_can_be_decoded(ids):
    assert isinstance(TOKENIZER.decode(ids), str)
    assert isinstance(TOKENIZER.decode(ids, skip_special=False), str)


def test_specials_are_distinct_ids_in_a_padded_vocabulary():
    t = TOKENIZER
    ids = [t.BOS, t.EOS, t.PAD, t.IMAGE, t.AUDIO, t.SEP, t.LANG]
    assert len(set(ids)) == len(ids) and min(ids) >= 256
    assert t.vocab_size % 8 == 0 and t.vocab_size > max(ids)
    assert t.placeholders == {"vision": t.IMAGE, "audio": t.AUDIO}
    assert t.decode([t.BOS, 65, t.EOS]) == "A"
    assert t.decode([t.BOS, 65, t.EOS], skip_special=False) == "<bos>A<eos>"


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"264 is outside the vocabulary 0\.\.263"):
        TOKENIZER.decode([264])


def test_prompt_holds_media_text_and_language():
    t = TOKENIZER
    ids = t.prompt([("vision", 2), ("audio", 1)], "fr", "hi")
    assert ids == [t.BOS, t.IMAGE, t.IMAGE, t.AUDIO, *b"hi", t.LANG, *b"fr", t.SEP]
    with pytest.raises(ValueError, match="no placeholder token for modality 'video'"):
        t.prompt([("video", 2)], "fr")
