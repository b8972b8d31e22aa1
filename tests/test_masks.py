"""BitfieldMask against a pair-by-pair implementation of its rule (tests/mask_strategies.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan
from interlace.masks import ATTENDS_MASK, CAUSAL, NO_WINDOW, OWN_SHIFT, BitfieldMask, Segment, word
from tests.mask_strategies import mask_pairs, masks, rule


def int32(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# ---------------------------------------------------------------------- the rule


@settings(max_examples=150)
@given(mask_pairs(longest=24))
def test_dense_mask_is_the_rule(pair):
    mask, keys = pair
    assert torch.equal(mask.to_dense(keys), rule(mask, keys if keys is not None else mask))


@settings(max_examples=40)
@given(mask_pairs(longest=24))
def test_flex_mask_mod_is_the_rule(pair):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask, keys = pair
    length = mask.length if keys is None else keys.length
    dense = flex.create_mask(mask.to_flex(keys), mask.batch, 1, mask.length, length, device="cpu")
    assert torch.equal(dense[:, 0], mask.to_dense(keys))


@settings(max_examples=12)
@given(mask_pairs())
def test_a_flex_mask_mod_is_compared_pair_by_pair(pair):
    mask, keys = pair
    assert mask.differs_from_flex(mask.to_flex(keys), keys) is None
    length = mask.length if keys is None else keys.length
    if mask.batch * mask.length * length == 0:
        return
    last = (mask.batch - 1, mask.length - 1, length - 1)

    def flipped(b, h, q, k):
        return mask.to_flex(keys)(b, h, q, k) ^ ((b == last[0]) & (q == last[1]) & (k == last[2]) & (h == 1))

    assert mask.differs_from_flex(flipped, keys) is None  # the requested head is not the one that differs
    result = mask.differs_from_flex(flipped, keys, heads=2)
    assert (result.batch, result.head, result.query, result.key) == (last[0], 1, *last[1:])
    assert result.bitfield == bool(mask.to_dense(keys)[last]) != result.flex


def test_a_difference_reads_as_a_sentence_and_samples_find_it():
    mask = BitfieldMask.causal(1, 700)  # more pairs than are evaluated at a time

    def off_by_one(b, h, q, k):
        return k < q

    def late(b, h, q, k):
        return (k <= q) | (q >= 600)

    result = mask.differs_from_flex(off_by_one)
    assert str(result) == "query 0 sees key 0 in the bitfield but not in mask_mod (row 0, head 0)"
    result = mask.differs_from_flex(late)
    assert str(result) == "query 600 sees key 601 in mask_mod but not in the bitfield (row 0, head 0)"
    sampled = mask.differs_from_flex(late, samples=1000)
    assert sampled == mask.differs_from_flex(late, samples=1000) and sampled.query >= 600
    assert mask.differs_from_flex(mask.to_flex(), samples=1000) is None
    with pytest.raises(ValueError, match="heads is 0"):
        mask.differs_from_flex(late, heads=0)
    with pytest.raises(ValueError, match="samples is 0"):
        mask.differs_from_flex(late, samples=0)


def test_flex_block_mask_of_a_multimodal_row():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = BitfieldMask.from_segments([[Segment("text", 100), Segment("image", 300), Segment("text", 112)]])
    blocks = flex.create_block_mask(mask.to_flex(), 1, None, 512, 512, device="cpu")
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    ours = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense()[:, None])
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=blocks), ours)


def test_gemma3_rule():
    """Image tokens see earlier text, and their own image in both directions; they see another image only if it is
    earlier."""
    mask = BitfieldMask.from_segments([[Segment("text", 2), Segment("image", 2), Segment("image", 2)]])
    wanted = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1],
    ]
    assert mask.to_dense()[0].int().tolist() == wanted


def test_positions_restart_in_each_document():
    bits = torch.full((1, 7), word(0, causal=True))
    mask = BitfieldMask(bits, doc=int32([4, 4, 4, -1, 9, 9, 4]))
    assert mask.pos.tolist() == [[0, 1, 2, 0, 0, 1, 3]]


def test_window_with_sinks_is_a_lambda():
    dense = BitfieldMask.causal(1, 8, window=2, sinks=1).to_dense()[0]
    assert dense[6].int().tolist() == [1, 0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("sinks", [2**31, 2**40, 2**64])
def test_sinks_beyond_every_position_are_no_window(sinks):
    """Positions are int32: a larger number would wrap around, or only some backends would refuse it."""
    mask = BitfieldMask.causal(1, 8, window=2, sinks=sinks)
    assert torch.equal(mask.to_dense(), BitfieldMask.causal(1, 8).to_dense())
    assert AttentionPlan.build(mask, block=4).stats().full == 1


def test_sign_bit_words():
    assert word(0, causal=True) < 0 and word(0, causal=True) & CAUSAL != 0
    assert word(55) >> OWN_SHIFT == 55 and word(55) & ATTENDS_MASK == ATTENDS_MASK
    assert word(3, []) == 3 << OWN_SHIFT  # sees nothing


# ---------------------------------------------------------------------- constructors


def test_causal_and_full():
    assert torch.equal(BitfieldMask.causal(2, 5).to_dense(), torch.ones(2, 5, 5).tril().bool())
    assert BitfieldMask.full(2, 5).to_dense().all()


def test_from_segments_numbers_streams_and_pads():
    rows = [
        [Segment("text", 2), Segment("audio", 1), Segment("image", 2), Segment("image", 1, stream=7)],
        [Segment("image", 2), ("text", 1)],
    ]
    mask = BitfieldMask.from_segments(rows)
    assert mask.own[0].tolist() == [0, 0, 1, 2, 2, 7]
    assert mask.own[1, :3].tolist() == [2, 2, 0]
    assert mask.doc.tolist() == [[0] * 6, [0, 0, 0, -1, -1, -1]]
    assert mask.span.tolist() == [[-1, -1, 0, 1, 1, 2], [0, 0, -1, -1, -1, -1]]
    assert not mask.to_dense()[1, 3:].any() and not mask.to_dense()[1, :, 3:].any()
    named = BitfieldMask.from_segments(rows, streams={"image": 1})
    assert named.own[0].tolist() == [0, 0, 2, 1, 1, 7]


@pytest.mark.parametrize("kinds", [55, 56, 80])
def test_from_segments_of_more_kinds_than_streams(kinds):
    """Kinds beyond the last stream share it. Visibility is still causal, and bidirectional within a segment."""
    names = [f"kind {n}" for n in range(kinds)]
    mask = BitfieldMask.from_segments([[Segment("text", 2), *(Segment(name, 2) for name in names), Segment("text", 1)]])
    index = torch.arange(mask.length)
    segment = (index // 2).masked_fill(index < 2, -1).masked_fill(index == mask.length - 1, -2)
    wanted = (index[:, None] >= index) | ((segment[:, None] == segment) & (segment[:, None] >= 0))
    assert torch.equal(mask.to_dense()[0], wanted)
    assert mask.own[0, 2:-1:2].tolist() == [min(n + 1, 55) for n in range(kinds)]
    named = BitfieldMask.from_segments([[Segment(name, 1) for name in names]], streams={"kind 3": 55, "kind 5": 2})
    assert torch.equal(named.to_dense()[0], torch.ones(kinds, kinds, dtype=torch.bool).tril())
    assert named.own[0, 3] == 55 and named.own[0, 5] == 2 and (named.own == 2).sum() == 1


def test_from_segments_of_text_alone_is_causal():
    mask = BitfieldMask.from_segments([[Segment("text", 3), Segment("text", 2)]] * 2)
    assert mask.doc is None and mask.span is None
    assert torch.equal(mask.to_dense(), BitfieldMask.causal(2, 5).to_dense())


@settings(max_examples=60)
@given(st.lists(masks(longest=10), min_size=1, max_size=4))
def test_pack_is_block_diagonal(parts):
    for mask in parts:
        mask.sinks = parts[0].sinks
    packed = BitfieldMask.pack(parts)
    blocks = [row for mask in parts for row in mask.to_dense()]
    assert packed.batch == 1
    assert torch.equal(packed.to_dense()[0], torch.block_diag(*(block.int() for block in blocks)).bool())


def test_pack_keeps_a_common_window_and_refuses_differing_sinks():
    same = BitfieldMask.pack([BitfieldMask.causal(1, 4, window=2), BitfieldMask.causal(2, 3, window=2)])
    assert same.window == 2 and same.length == 10
    mixed = BitfieldMask.pack([BitfieldMask.causal(1, 2, window=2, sinks=1), BitfieldMask.full(1, 1)])
    assert mixed.window.tolist() == [[2, 2, NO_WINDOW]] and mixed.sinks == 1
    with pytest.raises(ValueError, match="sinks"):
        BitfieldMask.pack([BitfieldMask.causal(1, 2, window=2, sinks=s) for s in (1, 2)])
    with pytest.raises(ValueError, match="at least one"):
        BitfieldMask.pack([])


@settings(max_examples=60)
@given(masks(longest=20), st.data())
def test_select_keeps_what_tokens_see(mask, data):
    index = data.draw(st.lists(st.integers(0, mask.length - 1), min_size=1, max_size=30))
    dense = mask.to_dense()
    part = mask.select(torch.tensor(index))
    assert torch.equal(part.to_dense(mask), dense[:, index])
    assert torch.equal(part.to_dense(), dense[:, index][:, :, index])
    assert torch.equal(mask.to_dense(part), dense[:, :, index])


def test_select_by_slice_and_by_row():
    mask = BitfieldMask.causal(2, 6)
    assert mask.select(slice(4, None)).pos.tolist() == [[4, 5], [4, 5]]
    assert mask.select(torch.tensor([[0, 5], [3, 1]])).pos.tolist() == [[0, 5], [3, 1]]
    with pytest.raises(IndexError, match=r"0\.\.5"):
        mask.select([6])
    with pytest.raises(TypeError, match="index"):
        mask.select(torch.tensor([True] * 6))
    with pytest.raises(ValueError, match="3 rows"):
        mask.select(torch.zeros(3, 1, dtype=torch.int64))


# ---------------------------------------------------------------------- Cornstarch's bitfield dialects


WORDS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 1 << 40, (1 << 60) | 1, 1 << 60, (1 << 60) | (1 << 5)])


@settings(max_examples=100)
@given(st.lists(st.tuples(WORDS, st.booleans()), min_size=1, max_size=14))
def test_text_bit_dialect_is_the_published_code(pairs):
    """The rule of the 2025 papers' kernel, written out: bit 0 decides, bits 62 and 63 are never read."""
    words = [value | (1 << 62 if flag else 0) for value, flag in pairs]
    dense = BitfieldMask.from_cornstarch(torch.tensor([words]), "text_bit").to_dense()[0]
    plain = [value & (2**62 - 1) for value in words]
    for i, q in enumerate(plain):
        for j, k in enumerate(plain):
            wanted = (i >= j and q & k != 0) if q & 1 else (q == k and q != 0)
            assert bool(dense[i, j]) == wanted, (i, j)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 1 << 40, 1 << 60, (1 << 60) | 1]), st.booleans()), max_size=14
    )
)
def test_causal_bit_dialect_is_the_dissertation(pairs):
    """Bit 63 = causal; the other bits are the modalities seen; a token with bit 0 is text, else its only modality."""
    words = [value - (1 << 63) if causal else value for value, causal in pairs]
    dense = BitfieldMask.from_cornstarch(torch.tensor([words], dtype=torch.int64)).to_dense()[0]
    for i, (q, causal) in enumerate(pairs):
        for j, (k, _) in enumerate(pairs):
            own = 1 if k & 1 else k
            assert bool(dense[i, j]) == (q & own != 0 and (not causal or j <= i)), (i, j)


def test_cornstarch_masks_keep_streams_and_refuse_ambiguity():
    causal = -(1 << 63)
    mask = BitfieldMask.from_cornstarch(torch.tensor([[causal | 0b111, 0b010, 0b100, causal | 0b111]]))
    assert mask.own.tolist() == [[0, 1, 2, 0]] and mask.doc is None
    assert mask.to_dense()[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="modalities"):
        BitfieldMask.from_cornstarch(torch.tensor([[0b110]]))
    with pytest.raises(ValueError, match="streams"):
        BitfieldMask.from_cornstarch(
            torch.tensor([[1 << b | 1 << c for b in range(1, 13) for c in range(b)]]), "text_bit"
        )
    with pytest.raises(ValueError, match="dialect"):
        BitfieldMask.from_cornstarch(torch.tensor([[1]]), "other")
    with pytest.raises(TypeError, match="int64"):
        BitfieldMask.from_cornstarch(torch.tensor([1]))


# ---------------------------------------------------------------------- refusals, pictures, moves


BITS = torch.full((2, 4), word(0, causal=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bits": BITS.int()}, TypeError, "bits must be an int64"),
        ({"bits": BITS[0]}, TypeError, r"\[batch, length\]"),
        ({"bits": [[1]]}, TypeError, "bits"),
        ({"bits": BITS | (1 << 62)}, ValueError, "bit 62"),
        ({"bits": torch.full((2, 4), 56 << OWN_SHIFT)}, ValueError, "OWN"),
        ({"doc": torch.zeros(2, 4)}, TypeError, "doc must be an int32"),
        ({"doc": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"doc has shape \[2, 3\]"),
        ({"doc": torch.full((2, 4), -2, dtype=torch.int32)}, ValueError, "doc holds -2"),
        ({"span": torch.full((2, 4), -3, dtype=torch.int32)}, ValueError, "span holds -3"),
        ({"pos": torch.full((2, 4), -1, dtype=torch.int32)}, ValueError, "pos holds -1"),
        ({"pos": torch.full((2, 4), NO_WINDOW, dtype=torch.int32)}, ValueError, "positions stay below"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"window": 1.5}, TypeError, "window must be an int"),
        ({"window": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, "window values"),
        ({"sinks": -1}, ValueError, "sinks is -1"),
        ({"doc": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, ValueError, "meta"),
        (
            {"doc": int32([0, 0, 1, 1], [0, 0, 0, 0]), "span": int32([-1, 5, 5, -1], [5, 5, 5, 5])},
            ValueError,
            "span 5 occurs in two documents",
        ),
    ],
)
def test_bad_masks_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        BitfieldMask(**{"bits": BITS, **arguments})


def test_other_refusals():
    with pytest.raises(ValueError, match="stream 56"):
        word(56)
    with pytest.raises(ValueError, match="stream 56"):
        BitfieldMask.from_segments([[Segment("image", 2, stream=56)]])
    with pytest.raises(ValueError, match="length of segment 'text'"):
        BitfieldMask.from_segments([[Segment("text", -1)]])
    with pytest.raises(ValueError, match="3 rows"):
        BitfieldMask.causal(2, 4).to_dense(BitfieldMask.causal(3, 4))


@pytest.mark.parametrize(
    "given",
    [
        [Segment("text", 3)],
        [("text", 3)],
        Segment("text", 3),
        [{"text": 3}],
        [["text"]],
        [[(3, "text")]],
        [[Segment("text", 3), None]],
        "text",
        3,
        None,
    ],
)
def test_from_segments_shows_the_form_it_takes(given):
    with pytest.raises(
        TypeError, match=r"list of rows, each a list of segments, \[\[Segment\('text', 12\), .*; got "
    ) as error:
        BitfieldMask.from_segments(given)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="stream of segment 'image' must be an int, got str 'a'"):
        BitfieldMask.from_segments([[Segment("image", 2, "a")]])


@pytest.mark.parametrize("length", [60, 3000])
def test_plot_writes_a_png(tmp_path, length):
    image = pytest.importorskip("matplotlib.image")
    parts = [[Segment("text", length // 3), Segment("image", length // 4)], [Segment("audio", length // 5)]]
    mask = BitfieldMask.pack([BitfieldMask.from_segments(parts), BitfieldMask.causal(1, length, window=9, sinks=2)])
    path = mask.plot(tmp_path / "new" / "mask.png")
    pixels = image.imread(path)
    assert pixels.shape[0] > 500 and len({tuple(p) for p in pixels[::7, ::7].reshape(-1, pixels.shape[2]).tolist()}) > 4
    with pytest.raises(IndexError, match="row 1"):
        mask.plot(path, row=1)


def test_plot_names_streams(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    mask = BitfieldMask.from_segments([[Segment("text", 3), Segment("image", 2), Segment("audio", 2)]])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plain = mask.plot(tmp_path / "plain.svg").read_text()
        named = mask.plot(tmp_path / "named.svg", names={1: "vision"}).read_text()
    assert ">text<" in plain and ">stream 1<" in plain
    assert ">text<" in named and ">vision<" in named and ">stream 2<" in named and ">stream 1<" not in named


def test_to_moves_everything():
    mask = BitfieldMask.from_segments([[Segment("text", 2), Segment("image", 3)], [Segment("text", 1)]], window=3)
    moved = mask.to("meta")
    assert moved.device.type == "meta" and moved.doc.device.type == "meta" and moved.pos.device.type == "meta"
    assert mask.to("cpu") is mask and moved.window == 3
    assert "length=5" in repr(mask)
