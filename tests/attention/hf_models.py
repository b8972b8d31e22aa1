"""Tiny random models of the families that the drop-in is tested with, and inputs for them, under both transformers.

`case(name)` gives a model and its inputs; the attention mask among them marks the valid positions. Weights are spread
out, so that attention is far from uniform and every mask matters.
"""

from __future__ import annotations

import importlib
import inspect

import torch
import transformers

IMAGE, VOCAB = 50, 64
FIVE = int(transformers.__version__.split(".")[0]) >= 5
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **changes}))


def mistral(**changes):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**TEXT, "sliding_window": 4, **changes}))


def gemma2(**changes):
    options = {"query_pre_attn_scalar": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**TEXT, **options, **changes}))


def gemma3(*, window=4, **changes):
    text = {
        **TEXT,
        "query_pre_attn_scalar": 8,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
        **changes,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma(**changes):
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT, **changes},
        vision_config={"model_type": "siglip_vision_model", **SIGLIP, "projection_dim": 32},
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


ROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}


def qwen2_vl(**changes):
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**TEXT, "rope_scaling" if not FIVE else "rope_parameters": ROPE, **changes}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(**changes):
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    text = {**TEXT, "rope_scaling" if not FIVE else "rope_parameters": ROPE, **changes}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def siglip():
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIGLIP))


def siglip_text():
    sizes = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    return transformers.SiglipTextModel(transformers.SiglipTextConfig(**sizes, num_attention_heads=4))


def bert(**changes):
    sizes = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**{**sizes, **dropped, "num_hidden_layers": 2, **changes})
    return transformers.BertModel(config, add_pooling_layer=False)


def whisper():
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        transformers.WhisperConfig(
            d_model=16,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=16,
            attention_dropout=0.0,
            dropout=0.0,
        )
    )


FAMILIES = (llama, mistral, gemma2, gemma3, paligemma, qwen2_vl, qwen2_5_vl, siglip, siglip_text, bert, whisper)
MODELS = {family.__name__: family for family in FAMILIES}
IMAGE_TOKENS = {"gemma3": 4, "paligemma": 16, "qwen2_vl": 4, "qwen2_5_vl": 4}  # per image


def make(name, **changes):
    torch.manual_seed(0)
    model = MODELS[name](**changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text_ids(*shape, seed=0):
    return torch.randint(3, 45, shape, generator=torch.Generator().manual_seed(seed))


def layout(name, parts):
    """Token ids and kinds (1 at image positions) of a row; parts: numbers of text tokens, or "image"."""
    ids, kinds = [1], [0]
    for number, part in enumerate(parts):
        if part == "image":
            ids += [IMAGE] * IMAGE_TOKENS[name]
            kinds += [1] * IMAGE_TOKENS[name]
        else:
            ids += text_ids(part, seed=number).tolist()
            kinds += [0] * part
    return ids, kinds


def _takes(name, argument):
    """True if the family's own forward has this argument in the installed version of transformers."""
    module = {"qwen2_vl": "qwen2_vl.modeling_qwen2_vl", "qwen2_5_vl": "qwen2_5_vl.modeling_qwen2_5_vl"}[name]
    family = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[name]
    module = importlib.import_module(f"transformers.models.{module}")
    return argument in inspect.signature(getattr(module, f"{family}ForConditionalGeneration").forward).parameters


def batch(name, rows, *, side="right", suffix=3):
    """Model inputs for rows of parts, padded on `side`; the last `suffix` tokens of a PaliGemma row are its suffix."""
    made = [layout(name, parts) for parts in rows]
    length = max(len(ids) for ids, _ in made)
    ids, kinds, seen = [], [], []
    for row_ids, row_kinds in made:
        if name == "paligemma":
            row_kinds = [0] * (len(row_ids) - suffix) + [1] * suffix
        gap = [0] * (length - len(row_ids))
        for out, row, fill in ((ids, row_ids, gap), (kinds, row_kinds, gap), (seen, [1] * len(row_ids), gap)):
            out.append(row + fill if side == "right" else fill + row)
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(seen)}
    images = sum(part == "image" for parts in rows for part in parts)
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = torch.tensor(kinds)
        if images:
            inputs["pixel_values"] = random(images, 3, 16, 16)
    elif images:
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
        inputs["pixel_values"] = random(16 * images, 3 * 2 * 4 * 4)
        if _takes(name, "mm_token_type_ids"):
            inputs["mm_token_type_ids"] = torch.tensor(kinds)
    return inputs
