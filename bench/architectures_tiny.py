"""Tiny random models of every architecture in transformers, without a line per architecture.

A default config is shrunk by the names of its fields: sizes, heads, layers, vocabularies, windows. Lists with one entry
per layer keep one entry of each kind, so that a hybrid stays a hybrid. If a rule does not fit (heads that must divide,
two sizes that must be equal), the next of `STRATEGIES` is used.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

VOCAB, LAYERS, WINDOW, POSITIONS, IMAGE, PATCH, MELS = 64, 4, 4, 64, 16, 4, 8


@dataclass(frozen=True)
class Strategy:
    """Sizes to try. others: replacement for integers above 64 of unknown meaning (None: unchanged); fill: set sizes
    that the default config leaves empty."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 48
    others: int | None = None
    fill: bool = False


STRATEGIES = (
    Strategy(),
    Strategy(kv_heads=4),
    Strategy(fill=True),
    Strategy(kv_heads=4, fill=True),
    Strategy(others=32),
    Strategy(hidden=64, head_dim=16, inner=64),
    Strategy(hidden=64, kv_heads=4, head_dim=16, inner=64, others=64),
    Strategy(heads=2, kv_heads=1, head_dim=16, inner=64, others=16),
    Strategy(hidden=128, kv_heads=4, head_dim=32, inner=128),
    Strategy(hidden=256, kv_heads=4, head_dim=64, inner=256),
)

Rule = Callable[[Strategy, int], int]


def _at_most(limit: int) -> Rule:
    return lambda strategy, value: min(value, limit)


# The first row whose pattern matches the whole name of an integer field decides.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"(type|task_type|segment)_vocab_size|pretraining_tp|seed|chunk_size_feed_forward", lambda s, v: v),
    (r".*vocab_size.*|.*_vocab|num_embeddings", _at_most(VOCAB)),
    (r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|moe_layer_start_index|.*layer_offset", _at_most(1)),
    (r"moe_layer_end_index", lambda s, v: LAYERS - 1),
    (r"max_window_layers|num_mem_blocks|index_kpool", _at_most(2)),
    (
        r".*feature_layers?|.*(out|deepstack|fullatt_block)_(indices|indexes|layers)|chunk_.*context",
        _at_most(LAYERS - 1),
    ),
    (r".*(period|interval|every_n_layers|window_pattern|layer_group_size|res_block|sparse_step)", _at_most(2)),
    (r"num_nextn_predict_layers|num_mtp_.*", lambda s, v: 0),
    (r"((num|n)_.*)?(layers?|blocks)|.*coder_layers|depth|.*_depth|num_layers_per_stack", _at_most(LAYERS)),
    (r".*(key_value_heads|kv_heads|query_groups|multi_query_group_num)", lambda s, v: min(v, s.kv_heads)),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", _at_most(8)),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", _at_most(8)),
    (r"linear_num_key_heads|linear_num_heads", _at_most(2)),
    (r"linear_num_value_heads", _at_most(4)),
    (r"linear_.*head_dim", _at_most(8)),
    (r"(num|n)_.*heads?|.*attention_heads(_.*)?|num_heads|n_heads?", lambda s, v: min(v, s.heads)),
    (r"qk_head_dim", lambda s, v: 2 * s.head_dim),
    (r".*_input_size", lambda s, v: min(v, s.hidden)),
    (r"attention_hidden_size", lambda s, v: 2 * s.hidden),  # Zamba's, of two concatenated hidden states
    (r"attention_head_dim", lambda s, v: 2 * s.head_dim),
    (r".*head_dim|d_head|kv_channels|attention_head_size|dim_head|query_pre_attn_scalar|rotary_dim|head_size",
     lambda s, v: min(v, s.head_dim)),
    (r".*_rank|.*lowrank", _at_most(8)),
    (r".*(state_size|d_state)", _at_most(8)),
    (r".*(n_groups|ngroups|n_group|topk_group|num_expert_group|o_groups)", _at_most(1)),
    (r".*experts_per_tok(en)?|.*top_?k(_.*)?|moe_k", _at_most(2)),
    (r".*shared_experts", _at_most(1)),
    (r"zero_expert_num", _at_most(2)),
    (r".*experts", _at_most(4)),
    (r".*(sliding_window(_size)?|attention_window_size|window_size|local_attention|window_len|attention_chunk_size)",
     _at_most(WINDOW)),
    (r".*(chunk_size|chunk_length)", _at_most(4)),
    (r".*(max_.*positions?(_embeddings)?|n_positions|max_.*seq.*|max_length|.*seq_length|n_ctx|context_length|rel_extent"
     r"|num_positions)", _at_most(POSITIONS)),
    (r".*(mel_bins|feature_size|input_feat_per_channel)", _at_most(MELS)),
    (r".*image_size|.*img_size|input_size", _at_most(IMAGE)),
    (r".*patch_size", _at_most(PATCH)),
    (r".*(inner|intermediate|ffn|mlp_dim|ff_dim|dim_ff|d_ff|dff|feed_forward).*", lambda s, v: min(v, s.inner)),
    (r".*(hidden_size.*|d_model|n_embd|embed_dim|embedding_size|embedding_dim|dim|width|proj_size|d_inner|dims|"
     r"hidden_dim_.*|d_ssm|channels|cond_features|out_features|in_features)", lambda s, v: min(v, s.hidden)),
)  # fmt: skip
FILLED = (
    r".*head_dim|.*key_value_heads|.*experts.*|top_?k|moe_topk|n_group|topk_group|sliding_window|moe_intermediate_size"
)
TOKEN = re.compile(r".*(_id|_ids|_index|_token)$|.*_token_(id|ids|index).*")


def tiny_config(
    model_type: str,
    strategy: Strategy = STRATEGIES[0],
    variant: dict[str, Any] | None = None,
    config_class: type[PreTrainedConfig] | None = None,
) -> PreTrainedConfig:
    """The shrunk default config of a model type. Passes on what the config class raises for invalid sizes.

    variant: one of `variants`. config_class: replaces the config class of the model type.
    """
    return _shrunk((config_class or CONFIG_MAPPING[model_type])(), strategy, variant or {})


def variants(model_type: str) -> dict[str, dict[str, Any]]:
    """Name -> settings that enable features which the default config disables: a window, kinds of layers."""
    config = CONFIG_MAPPING[model_type]()
    config = config.get_text_config()
    given = vars(config)
    result: dict[str, dict[str, Any]] = {"default": {}}
    if "sliding_window" in given and given["sliding_window"] is None:
        result["sliding_window"] = {"sliding_window": WINDOW}
    if given.get("is_decoder") is False and not given.get("is_encoder_decoder"):
        result["is_decoder"] = {"is_decoder": True}  # BERT's family: causal only if the config sets it
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if key in inspect.signature(type(config).__init__).parameters:
            result[key] = {key: [1, 3]}
    for key in ("layer_types", "layers_block_type"):
        if key not in given:
            continue
        module = type(config).__module__
        source = "".join(
            inspect.getsource(importlib.import_module(name))
            for name in (module, module.replace("configuration_", "modeling_"))
        )
        known = [kind for kind in ALLOWED_LAYER_TYPES if f'"{kind}"' in source and kind not in ("sparse", "dense")]
        present = given[key] or known[:1]
        for kind in known:
            if kind not in (given[key] or []):
                result[kind] = {key: [present[0], kind] * (LAYERS // 2)}
    return result


def _shrunk(config: PreTrainedConfig, strategy: Strategy, variant: dict[str, Any]) -> PreTrainedConfig:
    given = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    layers = _layer_count(given)
    kept = _kept_layers(given, layers)
    accepted = inspect.signature(type(config).__init__).parameters
    changes: dict[str, Any] = {}
    tokens = iter(range(VOCAB - 1, 3, -1))
    for key, value in given.items():
        if key not in accepted:
            continue
        if isinstance(value, PreTrainedConfig):
            changes[key] = _shrunk(value, strategy, variant)
        elif key in variant:
            changes[key] = variant[key]
        elif TOKEN.fullmatch(key) and isinstance(value, int) and not isinstance(value, bool):
            if value >= VOCAB:
                changes[key] = next(tokens)
        elif key in ("id2label", "label2id"):
            continue
        else:
            new = _value(key, value, strategy, layers, kept)
            if new is not value:
                changes[key] = new
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= given.keys():  # Mamba's heads share expand * hidden
        sizes = {**given, **changes}
        changes["num_heads"] = int(sizes["expand"] * sizes["hidden_size"]) // sizes["head_dim"]
    if {"window_size", "spatial_merge_size", "patch_size"} <= given.keys():  # pixels, of whole merged patches
        changes["window_size"] = 2 * given["spatial_merge_size"] * {**given, **changes}["patch_size"]
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(given.get(key), list) and key in accepted:
            changes[key] = 2
    return type(config)(**changes)


def _layer_count(given: dict[str, Any]) -> int:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks", "decoder_layers", "depth")
    return next((given[name] for name in names if isinstance(given.get(name), int)), 0)


def _kept_layers(given: dict[str, Any], layers: int) -> list[int]:
    """Indices of LAYERS layers (or all, if fewer): the first of each kind, then the second of each, and so on."""
    lists = [value for value in given.values() if isinstance(value, (list, tuple, str)) and len(value) == layers > 1]
    kinds: dict[str, list[int]] = {}
    for i in range(layers):
        kinds.setdefault(repr([value[i] for value in lists]), []).append(i)
    rounds = itertools.zip_longest(*kinds.values())
    return sorted([i for once in rounds for i in once if i is not None][:LAYERS])


def _value(key: str, value: Any, strategy: Strategy, layers: int, kept: list[int]) -> Any:
    """New value of a field; `value` itself if no rule applies."""
    if value is None and strategy.fill and re.fullmatch(FILLED, key):
        return _value(key, 1 << 30, strategy, layers, kept)
    if isinstance(value, bool) or value is None:
        return True if key == "use_sliding_window" else value
    if isinstance(value, int):
        new = next((rule(strategy, value) for pattern, rule in RULES if re.fullmatch(pattern, key)), value)
        if new is value and strategy.others is not None and value > VOCAB:
            new = strategy.others
        return value if new == value else new
    if isinstance(value, float):
        return 0.0 if re.search(r"drop|jitter", key) and value else value
    if isinstance(value, dict):
        return _rope(value, strategy) if "rope" in key else value
    if not isinstance(value, (list, tuple, str)):
        return value
    if layers > LAYERS and len(value) == layers:
        value = "".join(value[i] for i in kept) if isinstance(value, str) else type(value)(value[i] for i in kept)
    elif value and not isinstance(value, str) and all(_is_repeated(item, layers) for item in value):
        return type(value)([item[0], LAYERS // len(item[0])] for item in value)
    elif value and all(type(item) is int for item in value) and re.search(r"layer_?(ids|idx)|idxs|indices", key):
        return type(value)([kept.index(item) for item in value if item in kept] or [min(layers, LAYERS) - 1])
    if isinstance(value, str) or not all(type(item) is int for item in value):
        return value
    return type(value)(_value(key.removesuffix("s"), item, strategy, 0, []) for item in value)


def _is_repeated(item: Any, layers: int) -> bool:
    """True if item has the form [kinds, repeats] for all layers."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and len(item[0]) * item[1] == layers


def _rope(value: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Rotary settings whose lists fit the head size; three sections if a model has them by default."""
    out: dict[str, Any] = {}
    if "rope_type" in value:
        value = {"mrope_section": [0, 0, 0], **value}
    for key, item in value.items():
        if isinstance(item, dict):
            item = _rope(item, strategy)
        elif key == "mrope_section":
            half = int(strategy.head_dim * value.get("partial_rotary_factor", 1.0)) // 2
            item = [half - 2 * (half // 3), half // 3, half // 3][: len(item)]
        elif key in ("short_factor", "long_factor"):
            item = [1.0 + 0.1 * i for i in range(strategy.head_dim // 2)]
        elif key == "original_max_position_embeddings":
            item = min(item, POSITIONS)
        out[key] = item
    return out
