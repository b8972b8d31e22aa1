"""torch.compile of HuggingFace models: one graph, and the numbers of eager attention."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.hf import FLASH_NAME, NAME, carrier, use_plan
from interlace.attention.hf.active import _own
from interlace.attention.hf.plans import cut
from interlace.attention.plan import interval_plan, traced_plan
from interlace.masks import BitfieldMask, visible
from tests.attention.hf_models import FIVE, batch, make, random, text_ids
from tests.attention.hf_pairs import assert_same, pair
from tests.mask_strategies import masks
from tests.model.zoo import assert_same_gradients, build, gradients, samples, siglip

PACKED = [
    AttentionPlan.build(BitfieldMask.pack([BitfieldMask.full(1, n), BitfieldMask.full(1, 16 - n)])) for n in (6, 9)
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(model, backend="aot_eager", **options):
    """A copy, compiled in place, so that its parameters keep their names."""
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend=backend, **options)
    return compiled


# ---------------------------------------------------------------------- language models, unchanged


def text_inputs():
    padded = {side: batch("llama", [[8], [5]], side=side) for side in ("right", "left")}
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    return {
        "no mask": {"input_ids": text_ids(2, 7)},
        "padding on the right": padded["right"],
        "padding on the left": padded["left"],
        "packed": {"input_ids": text_ids(1, 10), "position_ids": positions, "use_cache": False},
    }


def compared(family, kind):
    model, eager = pair(family)
    inputs = text_inputs()[kind]
    seen = inputs.get("attention_mask")
    assert_same(whole(model), eager, {"use_cache": False, **inputs}, None if seen is None else seen.bool())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_language_model_in_one_graph():
    compared("llama", "padding on the left")


@pytest.mark.slow
@pytest.mark.parametrize("kind", text_inputs())
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_language_models_in_one_graph(family, kind):
    """Mistral has a window. Gemma-2 also has a cap on its scores, which torch's own attention lacks."""
    compared(family, kind)


@pytest.mark.slow
def test_lengths_that_change_do_not_compile_anew():
    model, eager = pair("llama")
    compiled = whole(model, "eager", dynamic=True)
    for length in (9, 14, 130):
        ids = text_ids(1, length)
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, eager(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_inductor_and_gradients():
    model, eager = pair("gemma2")
    assert_same(whole(model, "inductor"), eager, {"input_ids": text_ids(2, 9), "use_cache": False})


@pytest.mark.slow
def test_a_mask_with_gaps_is_refused_in_one_graph():
    """Padding in the middle of a row. With graph breaks allowed, it is exact."""
    model, eager = pair("llama")
    ids, seen = text_ids(1, 6), torch.tensor([[1, 1, 0, 1, 1, 1]])
    wanted = eager(ids, attention_mask=seen, use_cache=False).logits[seen.bool()]
    with pytest.raises(ValueError, match=r"keys that are not consecutive.*fullgraph=True.*carrier\(plan\)"):
        whole(model, "eager")(ids, attention_mask=seen, use_cache=False)
    torch._dynamo.reset()
    broken = torch.compile(model, backend="eager")(ids, attention_mask=seen, use_cache=False).logits[seen.bool()]
    torch.testing.assert_close(broken, wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- plans


def tower(**changes):
    torch.manual_seed(0)
    return siglip(attn_implementation=NAME, **changes).eval()


def test_one_graph_follows_every_plan():
    """Also calls without a plan: two graphs in all, in any order of use."""
    model, pixels = tower(), random(1, 3, 16, 16)
    compiled = whole(model)
    for plan in (None, *PACKED, None, *PACKED):
        with use_plan(plan):
            torch.testing.assert_close(compiled(pixels).last_hidden_state, model(pixels).last_hidden_state)
    assert counters["stats"]["unique_graphs"] == 2
    result, wanted = ([], [])
    for run, grads in ((compiled, result), (model, wanted)):
        leaf = pixels.clone().requires_grad_()
        with use_plan(PACKED[0]):
            out = run(leaf).last_hidden_state
        (out * random(*out.shape, seed=1)).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*result, *wanted)


@pytest.mark.slow
def test_two_threads_have_two_plans():
    model, pixels = tower(), random(1, 3, 16, 16)
    compiled, both = torch.compile(model, backend="eager"), threading.Barrier(2, timeout=120)
    result = [[], []]

    def run(number):
        with use_plan(PACKED[number]):
            both.wait()
            for _ in range(3):
                result[number].append(compiled(pixels).last_hidden_state.detach())
            both.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plan, outputs in zip(PACKED, result):
        with use_plan(plan):
            wanted = model(pixels).last_hidden_state
        assert len(outputs) == 3
        for out in outputs:
            torch.testing.assert_close(out, wanted)


def test_a_plan_of_another_thread_is_refused():
    for plan in (None, PACKED[1]):
        with use_plan(plan), pytest.raises(RuntimeError, match="the plan that another thread set"):
            _own(PACKED[0].q_bits)
    with use_plan(PACKED[0]):
        assert torch.equal(_own(PACKED[0].q_bits), PACKED[0].q_bits)


def test_cuda_graphs_leave_out_what_reads_values():
    """mode="reduce-overhead" would replay these ops without running them."""
    for op in (torch.ops.interlace.own_plan, torch.ops.interlace.attention_plan):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_language_models_that_follow_a_plan(family):
    """Plans set by use_plan or carried by the mask; windows of the layers narrow both."""
    model, _ = pair(family)
    ids = text_ids(1, 10)
    plan = AttentionPlan.build(BitfieldMask.pack([BitfieldMask.causal(1, 4), BitfieldMask.causal(1, 6)]))
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    given = {"position_ids": positions, "use_cache": False}
    wanted = torch.cat([model(piece, use_cache=False).logits for piece in (ids[:, :4], ids[:, 4:])], dim=1)
    compiled = whole(model)
    with use_plan(plan):
        result = compiled(ids, **given).logits
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        compiled(ids, attention_mask=carrier(plan), **given).logits, wanted, rtol=1e-4, atol=1e-5
    )
    with use_plan(plan), pytest.raises(Exception, match="pass attention_mask=None"):
        compiled(ids, attention_mask=torch.ones_like(ids), **given)


@pytest.mark.slow
def test_layers_of_a_multimodal_model():
    """Includes several image sizes, which enter the first layer together."""
    mllm, plain = build(), build()
    for name in mllm.modules_order():
        for layer in mllm.layer_list(name):
            layer.compile(fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        both = []
        for model in (mllm, plain):
            model.zero_grad()
            output = model(**model.collate(samples(model, seed)))
            output.loss.backward()
            both.append((output.loss.detach(), gradients(model)))
        torch.testing.assert_close(both[0][0], both[1][0])
        assert_same_gradients(both[0][1], both[1][1])


# ---------------------------------------------------------------------- vision and audio towers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["siglip", "whisper"])
def test_towers_in_one_graph(name):
    model, eager = pair(name)
    inputs = {"pixel_values": random(2, 3, 16, 16)} if name == "siglip" else {"input_features": random(2, 8, 32)}
    assert_same(whole(model), eager, inputs)


@pytest.mark.slow
@pytest.mark.skipif(not FIVE, reason="the tower of transformers 4.57 loops over its images")
def test_a_tower_that_takes_all_its_images_in_one_call():
    both = []
    for implementation in (FLASH_NAME, "eager"):
        model = make("qwen2_vl").model.visual
        model.set_attn_implementation(implementation)
        both.append(model)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    patches = random(24, 3 * 2 * 4 * 4)
    result, wanted = whole(both[0])(patches, grid_thw=grid), both[1](patches, grid_thw=grid)
    torch.testing.assert_close(result.last_hidden_state, wanted.last_hidden_state, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- plans made in compiled code


@given(masks(longest=40), st.sampled_from([1, 4, 16]))
@settings(deadline=None, max_examples=40)
def test_lists_with_room_are_the_same_lists(mask, block):
    plan = AttentionPlan.build(mask, block=block)
    traced = traced_plan(mask.tokens(), mask.tokens(), plan.sinks, block)
    for result, wanted in zip((*traced.queries(), *traced.keys()), (*plan.queries(), *plan.keys())):
        assert torch.equal(result, wanted)
    for kind in ("full_q", "part_q", "full_k", "part_k"):
        pointers = getattr(plan, f"{kind}_ptr")
        assert torch.equal(getattr(traced, f"{kind}_ptr"), pointers)
        used = int(pointers[-1])
        assert torch.equal(getattr(traced, f"{kind}_idx")[:used], getattr(plan, f"{kind}_idx")[:used])
    assert traced.stats() == plan.stats()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_intervals_are_found_in_a_dense_mask(data):
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    cell = st.sampled_from([True, True, False])
    rows = data.draw(st.lists(st.lists(cell, min_size=keys, max_size=keys), min_size=2 * queries, max_size=2 * queries))
    seen = torch.tensor(rows).view(2, 1, queries, keys)
    text = ["".join("x" if cell else " " for cell in row).strip() for row in rows]
    if any(" " in row for row in text):
        with pytest.raises(ValueError, match="keys that are not consecutive"):
            interval_plan(seen, 4)
        return
    plan = interval_plan(seen, 4)
    assert torch.equal(visible(plan.queries().rows(), plan.keys().columns(), 0), seen[:, 0])


def left_padding(length, hidden):
    """Causal, with the first `hidden` tokens empty and invisible: bool [1, 1, T, T]."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:, :hidden] = False
    return seen[None, None]


def test_what_hidden_tokens_hold_does_not_spread():
    """Blocks of visible tokens also contain hidden ones, and 0 times NaN is NaN."""
    plan = interval_plan(left_padding(200, 8))
    assert torch.equal(plan.q_doc, plan.k_doc) and plan.k_doc[0].tolist() == [-1] * 8 + [0] * 192
    tensors = []
    for seed in range(3):
        tensor = random(1, 2, 200, 16, seed=seed)
        tensor[:, :, :8] = float("nan")
        tensors.append(tensor.requires_grad_())
    out = bitfield_attention(*tensors, plan, backend="cpu")[:, :, 8:]
    for result in (out, *(grad[:, :, 8:] for grad in torch.autograd.grad(out.sum(), tensors))):
        assert result.isfinite().all()


def test_what_padding_holds_does_not_spread_in_one_graph():
    model, eager = pair("llama")
    ids, seen = text_ids(1, 40), torch.ones(1, 40, dtype=torch.long)
    embedded = model.get_input_embeddings()(ids).detach()
    embedded[:, :8], seen[:, :8] = float("nan"), 0
    given = {"attention_mask": seen, "use_cache": False}
    result = whole(model)(inputs_embeds=embedded, **given).logits[:, 8:]
    wanted = eager(inputs_embeds=embedded.nan_to_num(), **given).logits[:, 8:]
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


def test_plans_are_cut_at_boundaries_in_one_graph():
    """Any number of documents. Here its product with the number of boundaries is 2**32, which is 0 in an int32."""
    doc = torch.tensor([[0] * 8 + [2**29] * 8], dtype=torch.int32)
    plan = AttentionPlan.build(BitfieldMask(BitfieldMask.full(1, 16).bits, doc=doc), block=4)
    ends = torch.tensor([0, 2, 4, 6, 10, 12, 14, 16])
    made = torch.compile(lambda ends: cut(plan, ends, ends), fullgraph=True, backend="aot_eager")(ends)
    pieces = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    result = visible(made.queries().rows(), made.keys().columns(), 0)
    assert torch.equal(result, (pieces[:, None] == pieces)[None])
    assert made.stats() == cut(plan, ends, ends).stats()


def test_the_op_keeps_torchs_rules():
    plan = AttentionPlan.build(BitfieldMask.causal(2, 9), block=4)
    fields = [*plan.queries(), *plan.keys()[:4]]
    torch.library.opcheck(
        torch.ops.interlace.attention_plan.default, (fields, 0, 4, False, torch.zeros(1, dtype=torch.bool))
    )
