"""Generation with a cache equals reading the whole sequence again for each token."""

from __future__ import annotations

import pytest
import torch

from interlace.model import Sample
from tests.model.zoo import LANGUAGE, build, logits_plain, plain, sample


@pytest.mark.parametrize("language", LANGUAGE)
def test_greedy_equals_recomputation(language):
    mllm = build(language=LANGUAGE[language]).train()
    one = sample(mllm, torch.Generator().manual_seed(0), 3, ("vision", 8, 8), 2, ("audio", 9), 4)
    oracle, ids = plain(mllm), one.input_ids
    with torch.no_grad():
        for _ in range(8):
            logits = logits_plain(oracle, Sample(ids, torch.full_like(ids, -100), one.media))[-1]
            logits[[46, 47]] = -torch.inf
            ids = torch.cat([ids, logits.argmax()[None]])
    expected = ids[len(one.input_ids) :].tolist()
    assert mllm.generate(one, max_new_tokens=8) == expected
    stop = expected[-1]
    assert mllm.generate(one, max_new_tokens=8, stop={stop}) == expected[: expected.index(stop)]
    assert mllm.training


def test_sampling():
    mllm = build(None, None)
    one = sample(mllm, torch.Generator().manual_seed(0), 5)

    def drawn(seed, **options):
        return mllm.generate(one, max_new_tokens=12, generator=torch.Generator().manual_seed(seed), **options)

    assert drawn(1, temperature=5.0) == drawn(1, temperature=5.0) != drawn(2, temperature=5.0)
    assert drawn(1, temperature=5.0, top_p=1e-6) == mllm.generate(one, max_new_tokens=12)
    assert drawn(1, temperature=1e-4) == mllm.generate(one, max_new_tokens=12)


def test_options_and_room():
    mllm = build(None, None, max_position_embeddings=8)
    one = sample(mllm, torch.Generator().manual_seed(0), 5)
    assert len(mllm.generate(one, max_new_tokens=64)) == 2
    assert mllm.generate(one, max_new_tokens=0) == []
    with pytest.raises(ValueError, match=r"leaves no room"):
        mllm.generate(sample(mllm, torch.Generator().manual_seed(0), 7))
    for wrong in ({"top_p": 0.0}, {"temperature": -1.0}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match=r"must be"):
            mllm.generate(one, **wrong)
