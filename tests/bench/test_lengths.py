"""Drawn lengths: within the ranges of their sources, and repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lengths import DATASETS, MIXES, draw, encoders_of


@pytest.mark.parametrize("mix", [*MIXES, *DATASETS])
def test_lengths_keep_to_their_distributions(mix: str) -> None:
    drawn = draw(mix, 4000, seed=1)
    again = draw(mix, 4000, seed=1)
    assert np.array_equal(drawn.total, again.total) and not np.array_equal(drawn.total, draw(mix, 4000).total)
    for place, name in enumerate(drawn.names):
        here, data = drawn.dataset == place, DATASETS[name]
        share = MIXES.get(mix, {name: 1.0})[name]
        assert here.mean() == pytest.approx(share, abs=0.03), name
        assert data.text.low <= drawn.text[here].min() and drawn.text[here].max() <= data.text.high
        assert np.median(drawn.text[here]) == pytest.approx(data.text.median, rel=0.15)
        for encoder in encoders_of(mix):
            tokens, items, rows = (part[encoder][here] for part in (drawn.tokens, drawn.items, drawn.rows))
            if encoder not in data.media:
                assert not rows.any() and not items.any()
                continue
            media = data.media[encoder]
            assert media.tokens.low <= tokens.min() and tokens.max() <= media.tokens.high
            assert np.median(tokens) == pytest.approx(media.tokens.median, rel=0.1)
            assert (rows == items * np.ceil(tokens / media.merge)).all()
    lengths = drawn.lengths()
    assert (lengths.tokens == drawn.text + sum(lengths.rows.values())).all() and lengths.targets.min() > 0


def test_published_means() -> None:
    """LibriSpeech 12.3 s, LJSpeech 6.57 s (50 frames a second)."""
    for name, seconds in (("librispeech", 12.3), ("ljspeech", 6.57)):
        assert draw(name, 20000).tokens["audio"].mean() / 50 == pytest.approx(seconds, rel=0.05)


def test_an_unknown_mix_is_named() -> None:
    with pytest.raises(ValueError, match="no mix or dataset 'movies': there are llava, "):
        draw("movies", 4)
