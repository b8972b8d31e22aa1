"""Labels that repeat their own ids are refused; valid labels never are."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.model import IGNORE, Sample, shift_labels
from tests.model.zoo import build

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=12)  # four ids: many runs of one token


def masked(ids, hidden):
    return torch.where(torch.tensor(hidden), torch.full_like(ids, IGNORE), ids)


@given(TEXTS, st.data())
@settings(deadline=None)
def test_shifted_labels_pass_without_a_word(text, data):
    ids = torch.tensor(text)
    last = data.draw(st.sampled_from([IGNORE, 0, 1, 2, 3]))  # target after the text, if known
    labels = torch.cat([ids[1:], torch.tensor([last])])
    labels = masked(labels, data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sample(ids, labels)


@given(TEXTS, st.data())
@settings(deadline=None)
def test_labels_beside_their_own_ids_are_told_by_what_follows(text, data):
    ids = torch.tensor(text)
    hidden = data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    labels = masked(ids, hidden)
    told = sum(not hidden[t] and text[t] != text[t + 1] for t in range(len(text) - 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if told >= 3:
            with pytest.raises(ValueError, match=r"sample 'x': labels repeat .* Sample.from_unshifted"):
                Sample(ids, labels, name="x")
        else:
            Sample(ids, labels, name="x")
    assert len(caught) == (0 < told < 3)
    right = Sample.from_unshifted(ids, labels, name="x")
    assert right.labels.tolist() == [*labels[1:].tolist(), IGNORE]


def test_labels_that_are_no_next_tokens_pass():
    ids = torch.tensor([4, 7, 7, 2, 9])
    Sample(ids, (3 * ids + 1) % 10)
    Sample(ids, torch.full_like(ids, IGNORE))
    clean = torch.tensor([4, 7, 7, 2, 9, 9])
    Sample(torch.tensor([4, 7, 0, 2, 9]), clean[1:])  # an id hidden from the model, but not from the labels


def test_answers_of_one_token_are_told_from_a_batch():
    samples = []
    for answer in (5, 6, 7):
        ids = torch.tensor([1, 8, 9, answer, 2])
        with pytest.warns(UserWarning, match="labels repeat input_ids"):
            samples.append(Sample(ids, torch.where(torch.arange(5) < 3, IGNORE, ids)))
    mllm = build(None, None)
    mllm.collate(samples[:2])
    with pytest.raises(ValueError, match="the batch: labels repeat input_ids"):
        mllm.collate(samples)
    right = [
        Sample.from_unshifted(one.input_ids, torch.where(one.labels < 0, one.labels, one.input_ids)) for one in samples
    ]
    mllm.collate([*right, samples[0]])


def test_a_models_own_labels_are_looked_at_too():
    mllm, ids = build(None, None), torch.tensor([[1, 8, 9, 5, 2]])
    with pytest.raises(ValueError, match=r"shift_labels\(labels\)"):
        mllm(ids, labels=ids)
    assert mllm(ids, labels=shift_labels(ids)).targets == 4


def test_shifting_keeps_rows_apart():
    rows = torch.tensor([[1, 2, 3], [4, IGNORE, 6]])
    assert shift_labels(rows).tolist() == [[2, 3, IGNORE], [IGNORE, 6, IGNORE]]
    with pytest.raises(ValueError, match="no tokens"):
        shift_labels(torch.empty(2, 0, dtype=torch.int64))
