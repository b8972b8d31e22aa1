"""torch.compile of HuggingFace models with inductor, in common modes, against eager attention.

Graph breaks are allowed here (test_compile.py requires one graph). Batches change from step to step, as in training.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from interlace.attention import AttentionPlan
from interlace.attention.hf import FLASH_NAME, NAME, carrier, use_plan
from interlace.masks import BitfieldMask
from tests.attention.hf_models import FIVE, batch, make, random, text_ids
from tests.attention.hf_pairs import ROWS, assert_same, packed, pair

TRAIN = [[[length], [5]] for length in (8, 12, 6, 17, 9, 140, 250)]  # the last two make several blocks


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")  # attention that falls back to a dense mask
        yield
    torch._dynamo.reset()


def compiled(model, **options):
    """A copy, compiled in place, so that its parameters keep their names."""
    made = copy.deepcopy(model)
    made.compile(**options)
    return made


def given(name, kind):
    """Inputs, and the positions to compare (None: all)."""
    if name in ("siglip", "whisper"):
        return {"siglip": {"pixel_values": random(2, 3, 16, 16)}, "whisper": {"input_features": random(2, 8, 32)}}[
            name
        ], None
    if kind == "packed":
        return packed(name)[0], None
    if kind == "no mask":
        return {"input_ids": text_ids(2, 9), "use_cache": False}, None
    inputs = batch(name, ROWS.get(name, [[9], [5]]), side=kind)
    return {**inputs, **({} if name == "bert" else {"use_cache": False})}, inputs["attention_mask"].bool()


def assert_the_op_ran(run):
    """Compiled code calls the op, as a profile shows."""
    with torch.profiler.profile() as profile:
        run()
    names = {event.name for event in profile.events()}
    assert "interlace::bitfield_attention" in names and not any("scaled_dot_product" in name for name in names)


def test_a_padded_batch_forward_and_backward():
    model, eager = pair("llama", num_hidden_layers=1)
    inputs, valid = given("llama", "right")
    quick = compiled(model)
    assert_same(quick, eager, inputs, valid)
    assert_the_op_ran(lambda: quick(**inputs))


CASES = [
    ("llama", "packed", {}),
    ("llama", "no mask", {"mode": "reduce-overhead"}),
    ("mistral", "left", {"dynamic": True}),
    ("mistral", "packed", {}),
    ("gemma2", "right", {}),
    ("gemma3", "right", {}),
    ("gemma3", "packed", {"dynamic": True}),
    ("paligemma", "right", {}),
    ("qwen2_vl", "left", {}),
    ("bert", "right", {}),
    ("siglip", "", {}),
    ("whisper", "", {"mode": "reduce-overhead"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_families_and_masks(name, kind, options, called_before):
    """Mistral, Gemma 2 and 3 have windows, Gemma 3 and PaliGemma bidirectional images; BERT is an encoder."""
    model, eager = pair(name)
    inputs, valid = given(name, kind)
    if called_before:
        model(**inputs)  # cached values must not affect later calls
    assert_same(compiled(model, **options), eager, inputs, valid)


@pytest.mark.slow
@pytest.mark.skipif(not FIVE, reason="the tower of transformers 4.57 loops over its images")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_towers_that_take_all_their_images_in_one_call(name):
    model, eager = pair(name, {"text_config": NAME, "vision_config": FLASH_NAME})
    inputs, valid = given(name, "right")
    assert_same(compiled(model), eager, inputs, valid)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
def test_checkpointed_layers(options):
    """The recomputation is compiled too, and gets the mask of the forward."""
    model, eager = pair("mistral")
    inputs, valid = given("mistral", "right")
    for each in (model, eager):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(compiled(model, **options), eager, inputs, valid)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["use_plan", "carrier"])
def test_plans_of_the_user(way):
    """Other documents from call to call, narrowed by Mistral's window."""
    model, _ = pair("mistral")
    quick = compiled(model)
    ids = text_ids(1, 12)
    for cut in (5, 8, 3):
        plan = AttentionPlan.build(BitfieldMask.pack([BitfieldMask.causal(1, cut), BitfieldMask.causal(1, 12 - cut)]))
        positions = torch.cat([torch.arange(cut), torch.arange(12 - cut)])[None]
        wanted = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :cut], ids[:, cut:])], dim=1)
        mask = carrier(plan) if way == "carrier" else None
        with use_plan(plan if way == "use_plan" else None):
            result = quick(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}])
def test_steps_of_changing_lengths(options):
    """Losses of AdamW's steps; new lengths do not each cause a compilation."""
    model, eager = pair("mistral", num_hidden_layers=1)
    quick = compiled(model, **options)
    losses, graphs = [], []
    for each in (quick, eager):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for rows in TRAIN:
            inputs = batch("mistral", rows)
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            loss = each(**inputs, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
            graphs.append(counters["stats"]["unique_graphs"])
    torch.testing.assert_close(torch.stack(losses[0]), torch.stack(losses[1]), rtol=1e-4, atol=1e-5)
    assert losses[0][0] > losses[0][4]
    assert graphs[1] == graphs[4] and graphs[5] == graphs[6], graphs  # sizes become dynamic after a change


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path):
    """TrainingArguments(torch_compile=True): losses and weights are those of eager attention, uncompiled."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    logs, models = [], []
    for implementation, fast in ((NAME, True), ("eager", False)):
        model = make("llama", num_hidden_layers=1).train()
        model.set_attn_implementation(implementation)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), torch_compile=fast, max_steps=4, per_device_train_batch_size=2, use_cpu=True,
            learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        rows = [{key: value[0] for key, value in batch("llama", [[n]]).items()} for n in (9, 5, 8, 8, 6, 11, 4, 4)]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=_padded)
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        models.append(model)
    assert len(logs[0]) == 4 and logs[0] == pytest.approx(logs[1], rel=1e-3)
    for result, wanted in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-4)


def _padded(rows):
    length = max(len(row["input_ids"]) for row in rows)
    made = {
        key: torch.stack([torch.nn.functional.pad(row[key], (0, length - len(row[key]))) for row in rows])
        for key in rows[0]
    }
    return {**made, "labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}
