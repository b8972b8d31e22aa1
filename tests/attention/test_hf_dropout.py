"""Attention dropout is refused and the error names the family's key for it; following the hint is sufficient."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from bench.architectures import ENCODER, LANGUAGE, STRATEGIES, model_class, population, tiny_config
from bench.architectures import _part_for as part_for
from interlace.attention.hf import NAME
from interlace.attention.hf.dropout import dropout_key, dropout_rate, path_of
from tests.attention.hf_models import TEXT, text_ids

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64}
BART = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 64}
FAMILIES = {
    "GPT2LMHeadModel": (GPT2, "attn_pdrop"),
    "GPTJForCausalLM": ({**GPT2, "rotary_dim": 4}, "attn_pdrop"),
    "BertModel": (SMALL, "attention_probs_dropout_prob"),
    "Qwen2ForCausalLM": (TEXT, "attention_dropout"),
    "BartForCausalLM": (BART, "attention_dropout"),  # its layers pass the rate to the attention
    "DistilBertModel": (
        {"n_layers": 1, "dim": 32, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64},
        "attention_dropout",
    ),
    "MllamaForCausalLM": (
        {**SMALL, "num_key_value_heads": 2, "cross_attention_layers": [], "pad_token_id": 0},
        "dropout",
    ),
    "DbrxForCausalLM": (
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "max_seq_len": 32},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
        },
        "attn_config.attn_pdrop",
    ),
}


def tables(config):
    """A config, and the configs and tables in it."""
    yield config
    for value in (config if isinstance(config, dict) else vars(config)).values():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from tables(value)


def drop_everywhere(config, rate=0.1):
    """Sets all dropout rates to one value, so that values alone do not identify the key."""
    for table in tables(config):
        entries = table if isinstance(table, dict) else vars(table)
        for key, value in list(entries.items()):
            named = isinstance(key, str) and "drop" in key and "layerdrop" not in key and "path" not in key
            if named and isinstance(value, (int, float)) and not isinstance(value, bool):
                entries[key] = rate
    return config


def put(config, path, value):
    *around, key = path.split(".")
    for name in around:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    if isinstance(config, dict):
        config[key] = value
    else:
        setattr(config, key, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_names_module_and_key_and_the_hint_works(family):
    kind = getattr(transformers, family, None)
    if kind is None:
        pytest.skip(f"this transformers has no {family}")
    sizes, key = FAMILIES[family]
    config = drop_everywhere(kind.config_class(**sizes, attn_implementation=NAME))
    padding = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with pytest.raises(
        ValueError, match=rf"\w*Attention has attention dropout in training \({re.escape(key)} = 0\.1 in \w+\)"
    ) as error:
        kind(config).train()(text_ids(1, 6), attention_mask=padding)
    hint = re.search(r"build the model from a config with (\S+) = 0, or use", str(error.value))
    put(config, hint[1], 0.0)
    kind(config).train()(text_ids(1, 6), attention_mask=padding)
    kind(drop_everywhere(config)).eval()(text_ids(1, 6), attention_mask=padding)


def test_modules_without_a_config_are_named_too():
    from interlace.attention.hf.dropout import no_dropout

    assert "Module has attention dropout in training (dropout = 0.2)" in str(no_dropout(torch.nn.Module(), 0.2))


# ---------------------------------------------------------------------- all families

# Its codec's config is not part of it; rates of encoder and decoder are equal only here (drop_everywhere).
UNSURE = {"kyutai_speech_to_text", "deimv2", "pp_doclayout_v3", "pp_doclayout_v4", "rt_detr", "rt_detr_v2"}


def on_meta(kind, name, change=lambda config: None):
    """A tiny model without weights, all rates of dropout 0.1 before `change`; and its config. None: not built."""
    made = model_class(kind, name)
    for strategy in STRATEGIES:
        try:
            config = drop_everywhere(part_for(made, tiny_config(name, strategy, None)))
            change(config)
            with torch.device("meta"):
                return made(config).train(), config
        except Exception:  # any exception of a config or a model: bench.architectures classifies them
            continue
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LANGUAGE, ENCODER])
def test_keys_of_all_families(kind):
    """For every attention module with dropout: the key found for it, set to 0 in the model's config, sets its rate."""
    examined = 0
    for _, name in (each for each in population() if each[0] == kind and each[1] == each[1].lower()):
        if name in UNSURE or (built := on_meta(kind, name)) is None:
            continue
        model, config = built
        result = {}
        for path, part in model.named_modules():
            if rate := dropout_rate(part):
                result.setdefault(path_of(config, part.config) + dropout_key(part, rate), path)
        for key, path in result.items():
            again, _ = on_meta(kind, name, lambda config, key=key: put(config, key, 0.0))
            assert dropout_rate(again.get_submodule(path)) == 0, f"{name}: {key} of {path}"
            examined += 1
    assert examined > 60
