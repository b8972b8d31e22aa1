"""Language models whose layers share more than the hidden state: exact as a whole, split only where that is allowed."""

from __future__ import annotations

import pytest
import torch
import transformers

from interlace.model import Sample
from tests.model.zoo import (
    PLACEHOLDERS,
    VOCAB,
    assert_same_gradients,
    build,
    dense_mask,
    encode_plain,
    gradients,
    plain,
    sample,
)

KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 3
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 9, "head_dim": 12},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "layer_types": KINDS},
    **{"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 5, "pad_token_id": 0},
}


def gemma4(per_layer=8, **changes):
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this transformers has no Gemma-4")
    config = {**SIZES, "hidden_size_per_layer_input": per_layer, "global_head_dim": 12, **changes}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**config))


def gemma3n(**changes):
    extra = {"hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2, "rms_norm_eps": 1e-6}
    config = {**SIZES, **extra, "activation_sparsity_pattern": [0.0] * 9, **changes}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**config))


MODELS = {"gemma4": gemma4, "gemma3n": gemma3n}


def texts(seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 45, (length,), generator=g) for length in (8, 5, 2)]
    return [Sample.from_unshifted(row) for row in rows]


@pytest.mark.parametrize("checkpointing", ("none", "full", "selective"))
@pytest.mark.parametrize("family", MODELS)
def test_packed_texts_are_what_they_are_alone(family, checkpointing):
    """Windows shorter than the texts, and ids that the model looks up again for every layer."""
    mllm = build(None, None, language=MODELS[family])
    mllm.set_checkpointing(checkpointing)
    batch, oracle = texts(), plain(mllm)
    oracle.set_checkpointing("none")
    total = torch.zeros(())
    alone = []
    for one in batch:
        logits = oracle.language_model(one.input_ids[None], use_cache=False).logits[0]
        alone.append(logits.detach())
        total = total + torch.nn.functional.cross_entropy(logits, one.labels, ignore_index=-100, reduction="sum")
    (total / 12).backward()
    output = mllm(**mllm.collate(batch))
    torch.testing.assert_close(output.logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
    if (family, checkpointing) == ("gemma3n", "selective"):
        with pytest.raises(
            ValueError, match="Gemma3nTextDecoderLayer modifies the result of a matrix product in place"
        ):
            output.loss.backward()
        return
    output.loss.backward()
    assert_same_gradients(gradients(mllm), gradients(oracle), 1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_images_count_as_padding_where_ids_are_looked_up(family):
    mllm = build(audio=None, language=lambda: MODELS[family](sliding_window=64)).eval()
    one = sample(mllm, torch.Generator().manual_seed(0), 3, ("vision", 8, 12), 4)
    oracle = plain(mllm)
    model = oracle.language_model
    feature = encode_plain(oracle.encoders["vision"], one.media["vision"][0], 1)
    embeds = model.get_input_embeddings()(one.input_ids).clone()
    here = one.input_ids == PLACEHOLDERS["vision"]
    embeds[here] = feature
    hidden = torch.zeros(dense_mask(one).shape).masked_fill(~dense_mask(one), torch.finfo(torch.float32).min)
    wanted = model(
        inputs_embeds=embeds[None],
        per_layer_inputs=model.model.get_per_layer_inputs(torch.where(here, 0, one.input_ids)[None]),
        attention_mask=hidden[None, None],
        use_cache=False,
    ).logits
    torch.testing.assert_close(mllm(**mllm.collate([one])).logits, wanted, rtol=1e-4, atol=1e-4)
    first = int(wanted[0, -1, :45].argmax())
    assert mllm.generate(one, max_new_tokens=3)[0] == first


def test_generation_goes_on_with_shared_keys():
    mllm = build(None, None, language=gemma4).eval()
    prompt = texts()[0].input_ids
    wanted = plain(mllm).language_model.generate(
        prompt[None], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :]
    assert mllm.generate(Sample.from_unshifted(prompt), max_new_tokens=5) == wanted.tolist()


def test_cuts_between_layers_that_share_keys_are_refused():
    """Layers 4 to 8 use the keys of 3 (sliding) and 2 (full): 9 layers may be cut before 1 and before 2."""
    mllm = build(None, None, language=lambda: gemma4(0))
    batch = mllm.collate_module("language_model", texts())
    whole = mllm.slice("language_model", 0, 9)(batch)
    for at in range(1, 9):
        if at <= 2:
            hidden = mllm.slice("language_model", 0, at)(batch)
            torch.testing.assert_close(mllm.slice("language_model", at, 9)(batch, hidden), whole)
            continue
        for start, stop in ((0, at), (at, 9)):
            with pytest.raises(ValueError, match=rf"before layer {at}: layer \d uses .* cut before layers 1, 2$"):
                mllm.slice("language_model", start, stop)


@pytest.mark.parametrize("family", MODELS)
def test_per_layer_inputs_are_not_cut(family):
    mllm = build(None, None, language=MODELS[family])
    mllm.slice("language_model", 0, 9)
    with pytest.raises(ValueError, match=r"a vector per token .* Keep this module on one stage"):
        mllm.slice("language_model", 0, 4)
