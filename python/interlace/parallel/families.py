"""Ready plans for HuggingFace families: what becomes of each part, by the name of its class. Nothing is imported.

A family is one entry per class; a class that inherits from one of them needs none.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch import nn

_ATTENTION = {f"self_attn.{name}_proj": "column" for name in "qkv"}
_DECODER = {
    "input_layernorm": "sequence",
    "self_attn": "gather",
    **_ATTENTION,
    "self_attn.o_proj": "row",
    "post_attention_layernorm": "sequence",
    "mlp": "gather",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}
_QWEN3 = {**_DECODER, "self_attn.q_norm": "heads", "self_attn.k_norm": "heads"}
_SIGLIP = {
    "layer_norm1": "sequence",
    "self_attn": "gather",
    **_ATTENTION,
    "self_attn.out_proj": "row",
    "layer_norm2": "sequence",
    "mlp.fc1": "column",
    "mlp.fc2": "row",
}
_WHISPER = {
    "self_attn_layer_norm": "sequence",
    "self_attn": "gather",
    **_ATTENTION,
    "self_attn.out_proj": "row",
    "final_layer_norm": "sequence",
    "fc1": "column",
    "fc2": "row",
}
_LANGUAGE_MODEL = {"embed_tokens": "replicate", "layers": "layers", "norm": "replicate"}
_SIGLIP_MODEL = {"embeddings": "replicate", "post_layernorm": "replicate", "head": "replicate"}

CLASSES: dict[str, dict[str, str]] = {
    "LlamaDecoderLayer": _DECODER,
    "Qwen2DecoderLayer": _DECODER,
    "Qwen3DecoderLayer": _QWEN3,
    "SiglipEncoderLayer": _SIGLIP,
    "WhisperEncoderLayer": _WHISPER,
    **{f"{family}Model": _LANGUAGE_MODEL for family in ("Llama", "Qwen2", "Qwen3")},
    **{f"{family}ForCausalLM": {"lm_head": "replicate"} for family in ("Llama", "Qwen2", "Qwen3")},
    "SiglipVisionModel": _SIGLIP_MODEL,
    "SiglipVisionTransformer": _SIGLIP_MODEL,  # transformers 4
    "SiglipEncoder": {"layers": "layers"},
    "WhisperEncoder": {
        "conv1": "replicate",
        "conv2": "replicate",
        "embed_positions": "replicate",
        "layers": "layers",
        "layer_norm": "replicate",
    },
}


def plan_for(module: nn.Module) -> dict[str, str]:
    """The plan of `tensor_parallel` for what is known inside `module`: its blocks, and what stands around them.

    Parts of other classes are left out, for the caller to add; a language model's head may be made "column_gathered"
    where it is not tied to the embeddings. Raises ValueError when nothing is known.
    """
    plan: dict[str, str] = {}
    for path, part in module.named_modules():
        known = next((CLASSES[base.__name__] for base in type(part).__mro__ if base.__name__ in CLASSES), {})
        for inside, style in known.items():
            if _has(part, inside):
                plan[f"{path}.{inside}" if path else inside] = style
    if not plan:
        raise ValueError(
            f"no plan is known for {type(module).__name__}: write one, module path -> style (see "
            f"interlace.parallel.tensor). Known are {', '.join(CLASSES)}"
        )
    return _for_transformers_4(module, plan)


def _for_transformers_4(module: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    try:
        old = int(version("transformers").split(".")[0]) < 5
    except PackageNotFoundError:
        old = False
    return {
        path: "gather_narrow" if old and type(module.get_submodule(path)).__name__ == "SiglipAttention" else style
        for path, style in plan.items()
    }


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        found = getattr(module, name, None)
        if not isinstance(found, nn.Module):
            return False
        module = found
    return True
