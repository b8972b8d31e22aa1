"""Generation with a cache equals recomputing the whole sequence for each token."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from interlace.model import MultimodalModel, Sample, generate
from interlace.train.report.answers import answer, prompt_of, truth_of
from tests.model.zoo import LANGUAGE, build, logits_plain, plain, qwen2, sample, samples


@pytest.mark.parametrize("language", LANGUAGE)
def test_greedy_equals_recomputation(language):
    mllm = build(language=LANGUAGE[language]).train()
    one = sample(mllm, torch.Generator().manual_seed(0), 3, ("vision", 8, 8), 2, ("audio", 9), 4)
    expected = recomputed(mllm, one, 8)
    assert mllm.generate(one, max_new_tokens=8) == expected
    stop = expected[-1]
    assert mllm.generate(one, max_new_tokens=8, stop={stop}) == expected[: expected.index(stop)]
    assert mllm.training


def recomputed(mllm, one, count):
    """Greedy answer: plain HuggingFace modules recompute prompt and answer for each token."""
    oracle, ids = plain(mllm), one.input_ids
    with torch.no_grad():
        for _ in range(count):
            logits = logits_plain(oracle, Sample(ids, torch.full_like(ids, -100), one.media))[-1]
            logits[list(mllm.placeholders.values())] = -torch.inf
            ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(one.input_ids) :].tolist()


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_a_batch_equals_its_prompts_one_by_one(backend):
    mllm = build(backend=backend)
    batch = samples(mllm)
    expected = [recomputed(mllm, one, 6) for one in batch]
    calls = []
    mllm.encoders["vision"].register_forward_hook(lambda *_: calls.append(1))
    assert generate(mllm, batch, max_new_tokens=6) == expected
    assert calls == [1]  # one call for the whole batch
    end = expected[1][2]  # answers of several lengths: finished prompts leave the batch
    cut = [ids[: ids.index(end)] if end in ids else ids for ids in expected]
    assert len(set(map(len, cut))) > 1
    assert generate(mllm, batch, max_new_tokens=6, stop=(end,)) == cut
    for size in (1, 2, 64):
        assert answer(mllm, batch, end=end, max_new_tokens=6, batch_size=size) == cut
    assert generate(mllm, []) == answer(mllm, [], end=end, max_new_tokens=6) == []


def test_sliding_windows_reach_back_in_their_own_prompt():
    mllm = build(None, None, language=lambda: qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1))
    batch = [sample(mllm, torch.Generator().manual_seed(i), 5 + i) for i in range(3)]
    model = plain(mllm).language_model.eval()
    expected = []
    with torch.no_grad():
        for one in batch:
            ids = one.input_ids[None]
            for _ in range(9):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1)[None]], 1)
            expected.append(ids[0, len(one) :].tolist())
    assert generate(mllm, batch, max_new_tokens=9) == expected


def test_prompts_and_truths_of_training_samples():
    one = Sample(torch.tensor([1, 5, 6, 7]), torch.tensor([-100, 6, 7, 2]), {}, "x")
    assert prompt_of(one, {}).input_ids.tolist() == [1, 5]
    assert prompt_of(one, {}).labels.tolist() == [-100, -100]
    assert truth_of(one, 2) == [6, 7] and truth_of(one, 3) == [6, 7, 2]
    assert truth_of(one, 7) == [6]  # text that a template writes after the end is not requested


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
    full, long = (sample(mllm, torch.Generator().manual_seed(0), n, name="long") for n in (7, 8))
    assert mllm.generate(full) == []
    assert [len(ids) for ids in generate(mllm, [full, one, full], max_new_tokens=64)] == [0, 2, 0]
    assert generate(mllm, [full, one])[1] == mllm.generate(one)
    with pytest.raises(ValueError, match=r"'long' has 9 tokens .* positions for 8: shorten"):
        mllm.generate(long)
    for wrong in ({"top_p": 0.0}, {"temperature": -1.0}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match=r"must be"):
            mllm.generate(one, **wrong)


def phi3_of_two_rotations():
    """A different rotation applies from 24 tokens on, also to earlier tokens."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64}  # fmt: skip
    rotation = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**sizes, original_max_position_embeddings=24, rope_scaling=rotation)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def test_frequencies_that_change_at_a_length():
    """Equal to recomputation of the whole text for each token, for any other prompts in the batch."""
    model = phi3_of_two_rotations()
    mllm = MultimodalModel({}, model)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (length,), generator=generator) for length in (6, 20, 40)]
    answers = generate(mllm, [Sample(row, torch.full_like(row, -100)) for row in ids], max_new_tokens=8)
    model.set_attn_implementation("eager")
    for row, answer_ in zip(ids, answers):
        for token in answer_:
            with torch.no_grad():
                assert int(model(row[None], use_cache=False).logits[0, -1].argmax()) == token
            row = torch.cat([row, torch.tensor([token])])
