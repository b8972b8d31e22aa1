"""Tables of DistTrain, Cornstarch and NVIDIA: shapes against the papers and torch, steps against bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaModel

from bench.papers import cornstarch_attention, cornstarch_frozen, cornstarch_placements, disttrain_steps, own_layouts
from bench.papers.cornstarch_shapes import EVA_CLIP, LLAMA, PHI4_AUDIO, QWEN2_VISION, WHISPER
from bench.papers.disttrain_steps import ENCODER, GENERATOR, LLM, Model, Step, in_order, reordered
from bench.papers.own_layouts import Case
from bench.papers.pipeline import LANGUAGE_MODEL, layout_of, play
from bench.papers.shapes import A40, Transformer, causal_pairs, unet
from interlace.layout import ParallelSpec
from interlace.run.tables.table import step_table
from interlace.schedule import Op, StageGraph, one_f_one_b

PRINTED_PARAMETERS = {  # billions; table 1 of either paper
    "Llama": (LLAMA, (1.2, 8, 32)), "EVA-CLIP": (EVA_CLIP, (1, 8, 18)), "Whisper": (WHISPER, (1.4, 7, 15)),
    "Qwen2 Vision": (QWEN2_VISION, (0.6, 3.9, 11.6)), "Phi4 Audio": (PHI4_AUDIO, (0.5, 3.4, 12.4)),
}  # fmt: skip


@pytest.mark.parametrize("family", PRINTED_PARAMETERS)
def test_shapes_have_the_printed_parameters(family):
    shapes, printed = PRINTED_PARAMETERS[family]
    for shape, billions in zip(shapes.values(), printed):
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.07)  # print has one or two digits


def test_disttrain_shapes_match_parameter_counts_of_the_paper():
    assert disttrain_steps.VIT_HUGE.parameters / 1e9 == pytest.approx(0.63, rel=0.01)
    for name, billions in (("MLLM-9B", 7), ("MLLM-15B", 13), ("MLLM-72B", 70)):
        assert disttrain_steps.LLAMA[name].parameters / 1e9 == pytest.approx(billions, rel=0.08)
    assert unet(64).parameters == pytest.approx(865.9e6, rel=1e-3)  # of Stable Diffusion 2.1, with norms and biases
    assert 4 < unet(128).flops / unet(64).flops < 16  # between convolutions and attention


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_of_a_transformer_are_those_that_torch_counts(kv_heads):
    config = LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, attn_implementation="eager",
    )  # fmt: skip
    model, tokens = LlamaModel(config).eval(), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long))
    shape = Transformer.of(3, 64, 160, heads=4, kv_heads=kv_heads, gated=True)
    assert counter.get_total_flops() == shape.flops(tokens, tokens**2)


def test_images_follow_the_published_counts_of_laion():
    side = disttrain_steps.SIDE
    for pixels, millions in ((256, 211), (512, 67), (1024, 9.6)):
        above = 0.5 * math.erfc(math.log(pixels / side.median) / side.sigma / math.sqrt(2))
        assert above == pytest.approx(millions / 413, abs=0.01)
    drawn = disttrain_steps.draw(50)
    totals = [tokens.sum() + text for tokens, text in zip(drawn.tokens, drawn.text)]
    assert max(totals) <= disttrain_steps.SEQUENCE and np.mean(totals) > 0.8 * disttrain_steps.SEQUENCE


def test_printed_figures_fit_together():
    """Rows of one kind of input share the language model's backward; the aware cut has the printed number of stages."""
    for kind in ("VLM", "ALM"):
        wholes = []
        for case, model in cornstarch_frozen.MARCH.items():
            if case.startswith(kind):
                counts = cornstarch_frozen.stages_of(case)
                wholes += [cut.llm_backward * llm for cut, (llm, _) in zip(model[1:], counts)]
                assert sum(counts[0]) == sum(counts[1]) and min(*counts[0], *counts[1]) > 0
        assert max(wholes) / min(wholes) < 1.015
    for size, rows in cornstarch_placements.THROUGHPUT.items():
        assert cornstarch_placements.needed_tflops(size, max(row[6] for row in rows.values())) > A40.peak / 1e12
    for length, rows in cornstarch_attention.ATTENTION.items():
        assert all(inter > causal for causal, inter, _, _ in rows.values()), length


# ---------------------------------------------------------------------- steps


def classical(forward: list[float], backward: list[float], microbatches: int) -> float:
    """End time of 1F1B of one module: stage s runs S - s - 1 forwards, then both in turn, then the rest."""
    stages = len(forward)
    lists = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        order = [("F", k) for k in range(ahead)]
        for k in range(microbatches):
            order += [("F", k + ahead)] * (k + ahead < microbatches) + [("B", k)]
        lists.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(lists[s]):
                continue
            op, k = lists[s][at[s]]
            needs = [(op, s - 1, k)] if op == "F" else [("F", s, k), (op, s + 1, k)]
            needs = [each for each in needs if 0 <= each[1] < stages]
            if all(each in done for each in needs):
                start = max([free[s], *(done[each] for each in needs)])
                free[s] = done[op, s, k] = start + (forward[s] if op == "F" else backward[s])
                at[s] += 1
    return max(done.values())


@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 1), (4, 4), (4, 9)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pipeline_takes_the_time_that_1f1b_takes(stages, microbatches, recompute):
    shape = Transformer.of(8, 16, 64)
    costs = {LANGUAGE_MODEL: shape.costs(10, causal_pairs(10), 1e-6, trainable=True)}
    layout = layout_of(costs, {LANGUAGE_MODEL: stages}, "parallel", recompute=recompute)
    layers = [stage.stop - stage.start for stage in layout.pipelines()[0].stages]
    forward = [n * shape.layer_flops(10, causal_pairs(10)) * 1e-6 for n in layers]
    backward = [seconds * (3 if recompute else 2) for seconds in forward]
    backward[0] -= forward[0] / layers[0]  # the input of the first layer needs no gradient
    result = play(costs, layout, microbatches, recompute=recompute).makespan
    assert result == pytest.approx(classical(forward, backward, microbatches))


def test_colocated_encoders_do_not_slow_the_pipeline():
    """A lane with two encoders is no bottleneck if durations are given and both together are not the slowest stage."""
    rows = cornstarch_placements.throughput("M", "VALM-SS", False)
    merged, parallel, ratio = (row.ours for row in rows)
    assert ratio == parallel / merged == pytest.approx(7 / 8, rel=0.02)  # equally fast, on one more stage


def degrees(encoder: int, llm: int, generator: int, pp: int) -> dict[str, ParallelSpec]:
    return {
        ENCODER: ParallelSpec(tp=2, dp=encoder), LLM: ParallelSpec(tp=2, pp=pp, dp=llm),
        GENERATOR: ParallelSpec(tp=4, dp=generator),
    }  # fmt: skip


@pytest.mark.parametrize("given", [(1, 1, 1, 1), (2, 4, 1, 2), (2, 3, 3, 1), (3, 6, 2, 2)])
@pytest.mark.parametrize("frozen", [frozenset(), frozenset({ENCODER, LLM, GENERATOR})])
def test_step_computes_every_sample_once_within_its_bounds(given, frozen):
    spec, samples = degrees(*given), disttrain_steps.draw(12)
    model = Model("MLLM-9B", frozen)
    for order in (in_order(12, given[1]), reordered(model, samples, spec)):
        assert sorted(order.reshape(-1).tolist()) == list(range(12))
        step = Step(model, samples, spec, order)
        for module in spec:
            chunks = [chunk for chunk in step.table().chunks if chunk.module == module]
            assert sorted(np.concatenate([chunk.samples for chunk in chunks]).tolist()) == list(range(12))
        media, llm, count = step.media_seconds, step.llm_seconds(), order.shape[1]
        busiest = [model.passes(m) * times.sum(axis=1).max() for m, times in media.items()]
        bound = max(*busiest, model.passes(LLM) * llm * count)
        alone = sum(model.passes(m) * times.sum() for m, times in media.items())
        alone += model.passes(LLM) * llm * 12 * spec[LLM].pp
        seconds = step.seconds()
        assert bound < seconds
        assert seconds < alone + 1.0  # with transfers and sums
        assert 0 < step.mfu(seconds) < 0.6  # at most the assumed kernel efficiency


def test_passes_follow_what_is_frozen():
    every = {setting: Model("MLLM-9B", frozen) for setting, frozen in disttrain_steps.FROZEN.items()}
    result = {name: [model.passes(m) for m in (ENCODER, LLM, GENERATOR)] for name, model in every.items()}
    assert result == {
        "nothing frozen": [3 - 1 / 32, 3.0, 3.0],  # images need no gradient
        "all modules frozen": [1.0, 2.0, 2.0],
        "encoder trained": [3 - 1 / 32, 2.0, 2.0],
        "language model trained": [1.0, 3.0, 2.0],
        "generator trained": [1.0, 2.0, 3.0],
    }


def test_shared_ranks_run_in_three_phases():
    name = "3.9B + 8B, pictures"
    case = Case.of(name, True)
    specs = {"vision": ParallelSpec(dp=case.gpus), LANGUAGE_MODEL: ParallelSpec(tp=4, pp=2, dp=case.gpus // 8)}
    costs = case.costs(1)
    layout = own_layouts.Layout.from_specs(own_layouts.Modules(costs), specs, placement="shared", costs=costs)
    table = step_table(layout, case.drawn.lengths(), microbatches=4)
    trainable = {module: (True,) * shape.layers for module, shape in case.shapes.items()}
    for own in one_f_one_b(StageGraph(layout, (("vision", LANGUAGE_MODEL),), trainable), table).actions:
        backward = [i for i, a in enumerate(own) if a.module == "vision" and a.op is Op.BACKWARD]
        last = max(i for i, a in enumerate(own) if a.module == LANGUAGE_MODEL and a.op is Op.BACKWARD)
        assert not backward or min(backward) > last
