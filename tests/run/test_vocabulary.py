"""Vocabulary-parallel language models in a lane: loss, gradients and norm equal those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import CohereConfig, CohereForCausalLM

from interlace.comm import run_local
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import ModalityModule, MultimodalModel, loss
from interlace.model.language import run_language
from interlace.parallel.vocabulary import VocabularyEmbedding, VocabularyHead
from interlace.run import parallelize
from tests import tiny
from tests.distributed.workers import run_ranks
from tests.parallel.vocabulary import gemma3
from tests.run.parity import oracle
from tests.run.tensor_parallel import LLM, assert_gradient, compare_holders, model, norm_of
from tests.tiny import random_microbatches, random_sample

WORDS = 53  # divisible by neither 2 nor 3 ranks
EIGHT = {"tp": 2, "pp": 2, "dp": 2}


@pytest.fixture(autouse=True)
def odd_words(monkeypatch):
    monkeypatch.setattr(tiny, "VOCAB", WORDS)


def layers_of(parallel, kind):
    """The layers of a kind on each rank."""
    return {
        rank: [layer for stage in stages.values() for layer in stage.modules() if type(layer) is kind]
        for rank, stages in parallel.stages.items()
    }


def check(mllm, layout, batch, *, steps=2, **options):
    """Loss, gradients and norm of a layout, twice in a row, and the loss of an evaluation."""
    value, gradients = oracle(mllm, batch)
    norm = norm_of(gradients, mllm)
    mllm.zero_grad()
    parallel = parallelize(mllm, layout, timeout=30, **options)
    if options.get("transport") != "distributed":
        compare_holders(parallel)
    for times in range(1, steps + 1):
        assert parallel.step(batch).loss == pytest.approx(value, rel=1e-5)
        result = parallel.full_gradients()
        for name, _ in mllm.named_parameters():
            expected = gradients[name]
            assert_gradient(name, result[name], None if expected is None else times * expected, norm)
        assert parallel.clip_grad_norm_(1e9) == pytest.approx(times * norm, rel=1e-6)
    assert parallel.evaluate(batch).loss == pytest.approx(value, rel=1e-5)
    return parallel


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "spec",
    [{"tp": 2, "pp": 2}, *(pytest.param(more, marks=pytest.mark.slow) for more in ({"tp": 3}, {"tp": 2}, EIGHT))],
    ids=str,
)
def test_words_among_the_ranks_of_a_lane(monkeypatch, spec, tied):
    """A few rows of logits at a time; tied weights on one stage and on two, with one replica and with several."""
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * WORDS * 3)
    mllm = model(tied=tied, encoders=("vision",))
    specs = {"vision": ParallelSpec(), LLM: ParallelSpec(**spec)}
    parallel = check(mllm, Layout.from_specs(mllm, specs), random_microbatches(mllm, "no_image"))
    for kind in (VocabularyEmbedding, VocabularyHead):
        result = [layer.weight.shape[0] for layers in layers_of(parallel, kind).values() for layer in layers]
        assert sum(result) == WORDS * spec.get("dp", 1) and max(result) == -(-WORDS // spec["tp"])


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_of_one_lane_have_one_piece_of_a_tied_weight(tied):
    mllm = model(tied=tied, encoders=())
    stages = tuple(Stage(LLM, i, i, i + 1, Lane((0, 1))) for i in range(2))
    layout = Layout({LLM: (ParallelSpec(tp=2, pp=2), (Pipeline(LLM, 0, stages),))}, 2)
    parallel = check(mllm, layout, random_microbatches(mllm, "text"))
    tables, heads = (layers_of(parallel, kind) for kind in (VocabularyEmbedding, VocabularyHead))
    for rank in range(2):
        assert (tables[rank][0].weight is heads[rank][0].weight) == tied


@pytest.mark.parametrize("frozen", ["lm_head", "model.embed_tokens", pytest.param("", marks=pytest.mark.slow)])
def test_frozen_words(frozen):
    mllm = model(encoders=("vision",))
    mllm.freeze(f"{LLM}.{frozen}" if frozen else LLM)
    mllm.train()
    specs = {"vision": ParallelSpec(), LLM: ParallelSpec(tp=2, pp=2)}
    check(mllm, Layout.from_specs(mllm, specs), random_microbatches(mllm, "all"), steps=1)


def test_chunks_without_targets():
    mllm = model(tied=True, encoders=())
    generator = torch.Generator().manual_seed(0)
    batch = [[random_sample(mllm, generator, text=5)] for _ in range(3)]
    batch[0][0].labels.fill_(-100)
    check(mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), batch)


def test_words_in_bfloat16():
    mllm = model(tied=True, encoders=())
    batch = random_microbatches(mllm, "text")
    value, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)})
    result = parallelize(mllm, layout, autocast=torch.bfloat16, timeout=30).step(batch).loss
    assert result != value and abs(result - value) <= 2e-2 * value
    name = f"{LLM}.model.embed_tokens.weight"
    grad = mllm.get_parameter(name).grad
    assert grad.dtype is torch.float32 and (grad - gradients[name]).norm() <= 0.15 * gradients[name].norm()


def halved(inputs, output):
    """A callback that needs the logits of all words: it subtracts their mean."""
    output.logits = 0.5 * (output.logits - output.logits.mean(-1, keepdim=True))
    return output


def test_a_callback_is_given_the_logits_of_all_words():
    mllm = model(encoders=())
    whole = ModalityModule(mllm.language_model, projector=None, postprocess=halved)
    mllm = MultimodalModel(encoders={}, language_model=whole)
    batch = random_microbatches(mllm, "text")
    parallel = check(mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=3)}), batch, steps=1)
    assert sum(map(len, layers_of(parallel, VocabularyHead).values())) == 3


def test_a_hook_on_the_cut_head_is_called_and_sees_all_words():
    mllm, seen = model(encoders=()), []
    batch = random_microbatches(mllm, "text")
    value, _ = oracle(mllm, batch)
    parallel = parallelize(mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), timeout=30)
    for (head,) in layers_of(parallel, VocabularyHead).values():
        head.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    assert parallel.step(batch).loss == pytest.approx(value, rel=1e-5)
    assert seen and set(seen) == {WORDS}


def test_embeddings_that_scale_are_cut_too():
    torch.manual_seed(0)
    mllm = MultimodalModel(encoders={}, language_model=gemma3(vocab_size=WORDS))
    parallel = check(
        mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2, pp=2)}), random_microbatches(mllm, "text"), steps=1
    )
    assert [len(layers) for layers in layers_of(parallel, VocabularyEmbedding).values()] == [1, 1, 0, 0]


def cohere():
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return CohereForCausalLM(
        CohereConfig(vocab_size=WORDS, intermediate_size=24, logit_scale=0.5, eos_token_id=1, **sizes)
    )


def lora_like():
    """A head that is more than a product: both weights stay whole."""
    language = model(encoders=()).language_model
    language.lm_head = nn.Sequential(language.lm_head)
    return language


@pytest.mark.parametrize("language", [cohere, lora_like])
def test_vocabulary_stays_whole_if_the_head_is_not_plain(language):
    torch.manual_seed(0)
    mllm = MultimodalModel(encoders={}, language_model=language())
    parallel = check(
        mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), random_microbatches(mllm, "text"), steps=1
    )
    for kind in (VocabularyEmbedding, VocabularyHead):
        assert not any(layers_of(parallel, kind).values())


def test_logits_of_a_stage_are_of_all_words():
    mllm = model(encoders=())
    batch = [sample for group in random_microbatches(mllm, "text") for sample in group]
    inputs = mllm.collate(batch)
    expected = mllm(**inputs).logits.detach()
    parallel = parallelize(mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), timeout=30)

    def rank(group):
        parallel._ranks[group.rank].connect({(0, 1): group})
        with torch.no_grad():
            stage = parallel.stages[group.rank][LLM, 0]
            return run_language(stage.language_model, mllm.language_settings, dict(inputs), None).logits

    for result in run_local(2, rank):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- between processes


def in_processes(rank: int, tied: bool) -> list[list[int]]:
    tiny.VOCAB = WORDS
    mllm = model(tied=tied, encoders=())
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2, pp=2)})
    parallel = check(mllm, layout, random_microbatches(mllm, "text"), transport="distributed", steps=1)
    return [list(p.shape) for name, p in parallel.named_parameters() if "embed" in name or "head" in name]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_words_among_processes(tied: bool) -> None:
    """Two stages of two ranks: a tied weight counts once in the norm, though each stage has pieces of it."""
    for rank, (kind, shapes) in enumerate(run_ranks(4, in_processes, tied)):
        assert kind == "returned", shapes
        assert shapes == [[27 - rank % 2, 24]]
