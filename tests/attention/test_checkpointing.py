"""Layers recomputed in the backward pass use the masks of the forward, with any checkpointing function."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, use_plan
from interlace.masks import BitfieldMask
from tests.attention.hf_models import FIVE, TEXT, random
from tests.attention.hf_pairs import assert_same
from tests.model.zoo import assert_same_gradients, build, gradients, samples, siglip

IMAGE = 50
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
EYES |= {"image_size": 16, "patch_size": 4}
EARS = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}
EARS |= {"max_source_positions": 16}

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")


def half_seen():
    """Pixels of one image whose right half is padding."""
    seen = torch.zeros(1, 16, 16, dtype=torch.bool)
    seen[..., :8] = True
    return seen


def idefics3(family="Idefics3"):
    config = getattr(transformers, f"{family}Config")(
        text_config={"model_type": "llama", **TEXT}, vision_config=EYES, image_token_id=IMAGE, scale_factor=2
    )
    inputs = {"input_ids": torch.tensor([[1, *[IMAGE] * 4, 7, 8, 9]]), "pixel_values": random(1, 1, 3, 16, 16)}
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), inputs | {
        "pixel_attention_mask": half_seen()[None]
    }


def aria():
    text = {"model_type": "aria_text", **TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    config = transformers.AriaConfig(
        text_config=text,
        vision_config={"model_type": "idefics3_vision", **EYES},
        image_token_index=IMAGE,
        projector_patch_to_query_dict={16: 4},
    )
    inputs = {"input_ids": torch.tensor([[1, *[IMAGE] * 4, 7, 8]]), "pixel_values": random(1, 3, 16, 16)}
    return transformers.AriaForConditionalGeneration(config), inputs | {"pixel_mask": half_seen()}


def whisper():
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "max_target_positions": 32}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**EARS, **decoder, **tokens)
    inputs = {"input_features": random(2, 8, 32).requires_grad_(), "decoder_input_ids": torch.tensor([[1, 5, 6]] * 2)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def qwen2_audio():
    config = transformers.Qwen2AudioConfig(
        audio_config=EARS, text_config={"model_type": "qwen2", **TEXT}, audio_token_index=IMAGE
    )
    heard = torch.zeros(1, 32, dtype=torch.long)
    heard[:, :24] = 1
    ids = torch.tensor([[1, *[IMAGE] * 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": random(1, 8, 32)}
    return transformers.Qwen2AudioForConditionalGeneration(config), inputs | {"feature_attention_mask": heard}


MODELS = {
    "idefics3": idefics3,
    "smolvlm": lambda: idefics3("SmolVLM"),
    "whisper": whisper,
    "qwen2_audio": qwen2_audio,
    "aria": aria,
}


@pytest.mark.parametrize("name", MODELS)
@REENTRANT
def test_transformers_checkpointing_with_positional_masks(name, reentrant):
    """Reentrant checkpointing detaches positional arguments, plans among them."""
    if name == "whisper" and reentrant and not FIVE:
        pytest.skip("Whisper of transformers 4.57 cannot be checkpointed so, under any attention")
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    model.set_attn_implementation(NAME)
    for checkpointed in (model, eager):
        checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            checkpointed.enable_input_require_grads()
    assert_same(model, eager, {**inputs, "use_cache": False})


PLAN = AttentionPlan.build(BitfieldMask.pack([BitfieldMask.full(1, 6), BitfieldMask.full(1, 10)]))


def tower():
    torch.manual_seed(0)
    made = siglip(attn_implementation=NAME).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def features(model, pixels):
    return model(pixels).last_hidden_state


def step(model, run=features):
    """Gradients of a step whose backward runs after the plan context ended."""
    pixels = random(1, 3, 16, 16).requires_grad_()
    with use_plan(PLAN):
        out = run(model, pixels)
    (out * random(*out.shape, seed=1)).sum().backward()
    return gradients(model)


@REENTRANT
def test_transformers_checkpointing_remembers_the_plan(reentrant):
    wanted = step(tower())
    model = tower()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_gradients(step(model), wanted)


@REENTRANT
def test_a_layer_recomputed_without_its_plan_is_refused(reentrant):
    """For every caller of torch's checkpoint: only the backward is outside of use_plan."""

    def recomputed(module, pixels):
        return checkpoint(features, module, pixels, use_reentrant=reentrant)

    with pytest.raises(ValueError, match=r"SiglipAttention is recomputed .*outside .*use_plan.*set_checkpointing"):
        step(tower(), recomputed)
    model = tower()
    step(model)  # its last forward used a plan
    pixels = random(1, 3, 16, 16).requires_grad_()
    with use_plan(None):
        recomputed(model, pixels).sum().backward()
    recomputed(tower(), pixels).sum().backward()  # this one never used a plan


@pytest.mark.parametrize("name", ["vision", "audio", "language_model"])
@REENTRANT
def test_transformers_checkpointing_of_multimodal_modules(name, reentrant):
    mllm = build().train()
    batch = mllm.collate(samples(mllm))
    mllm(**batch).loss.backward()
    wanted = {key: grad.clone() for key, grad in gradients(mllm).items() if grad is not None}
    mllm.zero_grad()
    module = mllm.language_model if name == "language_model" else mllm.encoders[name].module
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if not FIVE and name != "language_model":
        with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\), then set_checkpointing\(\)"):
            mllm(**batch)
        return
    mllm(**batch).loss.backward()
    assert_same_gradients(gradients(mllm), wanted)


@REENTRANT
def test_a_forward_without_a_plan_is_recomputed_without_one(reentrant):
    """The backward pass runs inside use_plan, as that of another model may."""
    model = siglip()
    model.set_attn_implementation(NAME)
    model.train()
    image = random(1, 3, 16, 16)
    model(pixel_values=image).last_hidden_state.sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    output = model(pixel_values=image.requires_grad_()).last_hidden_state.sum()
    tokens = (model.config.image_size // model.config.patch_size) ** 2
    apart = BitfieldMask.pack([BitfieldMask.full(1, 3), BitfieldMask.full(1, tokens - 3)])
    with use_plan(AttentionPlan.build(apart)):
        output.backward()
    assert_same_gradients(gradients(model), wanted)
