"""Sequence parallelism inside the stages of a pipeline: loss, gradients and norm equal those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CLIPVisionConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from interlace.layout import Layout, ParallelSpec
from interlace.model import Checkpointing, ModalityModule, MultimodalModel
from interlace.run import ParallelModel, parallelize
from interlace.schedule import Op
from tests.model import zoo
from tests.model.encoders import internvit, pixtral, siglip2
from tests.run.parity import FREEZING
from tests.run.random_cases import sweep
from tests.run.sequence_parallel import check_step, mixing
from tests.run.tensor_parallel import DUE, LLM, check_case, encoder_and_model, model
from tests.tiny import random_microbatches, random_sample

MORE = {"clip": zoo.clip, "pixtral": pixtral}
FIRST = 1000  # first seed, different from those of whole rows


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2))
def test_random_layouts_equal_one_process(seed: int) -> None:
    check_case(seed, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_equal_one_process() -> None:
    sweep(partial(check_case, sequence_parallel=True), range(FIRST + 2, FIRST + 36), DUE)


def rows_seen(parallel: ParallelModel) -> dict[tuple[int, str], list[int]]:
    """(rank, kind) -> rows of each call from now on: norms, attentions, heads, projectors."""
    seen: dict[tuple[int, str], list[int]] = {}

    def note(key: tuple[int, str]) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen.setdefault(key, []).append(given.shape[-2])

        return hook

    for rank, stages in parallel.stages.items():
        for stage in stages.values():
            for path, part in stage.named_modules():
                kind = path.rpartition(".")[2]
                if kind in ("input_layernorm", "post_attention_layernorm", "q_proj", "norm"):
                    part.register_forward_pre_hook(note((rank, kind)), with_kwargs=True)
    return seen


@given(
    st.sampled_from([2, 3]),
    st.sampled_from([1, 2]),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(get_args(Checkpointing)),
)
@settings(deadline=None, derandomize=True, max_examples=6, suppress_health_check=list(HealthCheck))
def test_rows_are_sharded_for_norms_but_not_for_attention(
    tp: int, pp: int, lengths: list[int], checkpointing: Checkpointing
) -> None:
    """Also fewer rows than ranks: norms work on equally many rows on each rank, attentions on all rows of the
    microbatch.
    """
    mllm = model(encoders=())
    generator = torch.Generator().manual_seed(0)
    batch = [[random_sample(mllm, generator, text=length)] for length in lengths]
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=tp, pp=pp)})
    parallel = check_step(mllm, batch, layout, checkpointing=checkpointing)
    seen = rows_seen(parallel)
    parallel.evaluate(batch)
    whole = [length + 1 for length in lengths for _ in range(2 // pp)]  # two layers in pp stages
    for rank in range(tp * pp):
        assert sorted(seen[rank, "q_proj"]) == sorted(whole)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert sorted(seen[rank, norm]) == sorted(-(-rows // tp) for rows in whole)
        if rank >= tp * (pp - 1):
            assert sorted(seen[rank, "norm"]) == sorted(length + 1 for length in lengths)


@pytest.mark.parametrize(
    ("freezing", "checkpointing"),
    [
        pytest.param(freezing, checkpointing, marks=[pytest.mark.slow] if (place + mode) % 3 else [])
        for place, freezing in enumerate(FREEZING)
        for mode, checkpointing in enumerate(get_args(Checkpointing))
    ],
)
def test_what_is_frozen_passes_gradients_on(freezing: str, checkpointing: Checkpointing) -> None:
    mllm = model()
    for path in FREEZING[freezing]:
        mllm.freeze(path)
    mllm.train()
    specs = {"vision": ParallelSpec(tp=2, pp=2), "audio": ParallelSpec(tp=3), LLM: ParallelSpec(tp=2, pp=2)}
    batch = random_microbatches(mllm, "no_image")[1:3]
    check_step(mllm, batch, Layout.from_specs(mllm, specs), checkpointing=checkpointing)


@pytest.mark.parametrize("name", ["internvit", "siglip2", *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_encoders_with_class_tokens_and_images_of_any_size(name: str) -> None:
    """17 tokens per image with its class token; several images in one row. Qwen3 has norms within heads."""

    def qwen3(**changes: Any) -> Qwen3ForCausalLM:
        sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
        return Qwen3ForCausalLM(Qwen3Config(**{**zoo.COMMON, **sizes, "vocab_size": zoo.VOCAB, **changes}))

    mllm = zoo.build(vision={"internvit": internvit, "siglip2": siglip2, **MORE}[name], audio=None, language=qwen3)
    generator = torch.Generator().manual_seed(0)
    first = zoo.sample(mllm, generator, 3, ("vision", 8, 12), 2, ("vision", 16, 16), 4)
    batch = [[first, zoo.sample(mllm, generator, 6)], [zoo.sample(mllm, generator, ("vision", 4, 12), 5)]]
    assert set(mllm.packing.values()) == {"packed"}
    parallel = check_step(mllm, batch, encoder_and_model(mllm, 2, 2, pp=2))
    assert all(any(cuts_rows(stage) for stage in stages.values()) for stages in parallel.stages.values())


def test_what_a_rank_uses_in_part_is_summed_once_a_step() -> None:
    """By an action of the checked lists, over the lanes of all replicas, and outside every backward."""
    mllm = model()
    specs = {"vision": ParallelSpec(tp=2, dp=2), "audio": ParallelSpec(), LLM: ParallelSpec(tp=3, pp=2)}
    parallel = check_step(mllm, random_microbatches(mllm, "all"), Layout.from_specs(mllm, specs))
    everywhere = {"vision": [(0, 1, 2, 3)], LLM: [(5, 6, 7), (8, 9, 10)]}
    result = [reduction for reduction in parallel.graph.reductions if reduction.in_part]
    assert {name: sorted({r.ranks for r in result if r.module == name}) for name in specs} == {
        **everywhere,
        "audio": [],
    }
    assert parallel._last is not None
    for rank in range(parallel.layout.world):
        actions = parallel._last[0].actions[rank]
        due = [i for i, reduction in enumerate(parallel.graph.reductions) if rank in reduction.ranks]
        assert sorted(action.other for action in actions if action.op is Op.REDUCE_GRAD) == due
        for stage in parallel.stages[rank].values():
            assert not any(parameter._backward_hooks for parameter in stage.parameters())


def test_weight_tied_across_sharded_and_whole_use_is_refused() -> None:
    mllm = model(encoders=())
    mllm.language_model.model.norm.weight = mllm.language_model.model.layers[0].input_layernorm.weight
    with pytest.raises(
        ValueError, match=r"model.norm.weight and .*input_layernorm.weight are one weight, .*untie the weight"
    ):
        parallelize(mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}))
    check_step(
        mllm, random_microbatches(mllm, "text")[:1], Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}),
        sequence_parallel=False,
    )  # fmt: skip


def cuts_rows(stage: Any) -> bool:
    return any(getattr(part, "sequence_parallel", False) for part in stage.modules())


def test_module_that_mixes_tokens_keeps_whole_rows() -> None:
    plain = model(encoders=("vision",))
    mixing(plain)
    mllm = MultimodalModel(
        encoders=dict(plain.encoders.items()), language_model=plain.language_model, placeholders=plain.placeholders
    )
    assert mllm.packing == {"vision": "packed", LLM: "alone"}
    parallel = check_step(mllm, random_microbatches(mllm, "all")[:2], encoder_and_model(mllm, 2, 2))
    cut = {key: cuts_rows(stage) for stages in parallel.stages.values() for key, stage in stages.items()}
    assert cut == {("vision", 0): True, (LLM, 0): False}


class Reader(nn.Module):
    """A projector with a block of its own, which a plan can shard, on rows that are not those of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 6}
        config = CLIPVisionConfig(**sizes, attn_implementation="sdpa")
        self.layers = nn.ModuleList([CLIPEncoderLayer(config)])
        self.out = nn.Linear(24, 24)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](features[None, :-1], None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.out(torch.cat([hidden[0], features[-1:]]))


def test_a_module_with_other_blocks_keeps_whole_rows() -> None:
    plain = model(encoders=("vision",))
    vision = ModalityModule(plain.encoders["vision"].module, Reader())
    mllm = MultimodalModel({"vision": vision}, plain.language_model, placeholders=plain.placeholders)
    batch = [[random_sample(mllm, torch.Generator().manual_seed(3), images=1)]]
    parallel = check_step(
        mllm, batch, Layout.from_specs(mllm, {"vision": ParallelSpec(tp=2, pp=2), LLM: ParallelSpec()})
    )
    stages = {key: stage for stages in parallel.stages.values() for key, stage in stages.items()}
    assert not cuts_rows(stages["vision", 0]) and not cuts_rows(stages["vision", 1])


# ---------------------------------------------------------------------- between processes


def distributed(rank: int, seeds: list[int]) -> int:
    return sum(bool(check_case(seed, "distributed", range(4, 5), sequence_parallel=True)) for seed in seeds)


@pytest.mark.parametrize(
    "seeds", [[FIRST + 2], pytest.param(list(range(FIRST + 3, FIRST + 13)), marks=pytest.mark.slow)]
)
def test_four_processes_equal_one(seeds: list[int], pool: Any) -> None:
    assert pool.returned(4, distributed, seeds, timeout=180) == [len(seeds)] * 4
