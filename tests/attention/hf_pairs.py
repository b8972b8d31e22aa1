"""Pairs of a tiny HuggingFace model and its copy with eager attention, inputs for both, and their comparison."""

from __future__ import annotations

import copy

import torch

from interlace.attention import hf
from tests.attention.hf_models import batch, make, random

TEXT = ("llama", "mistral", "gemma2")
MULTIMODAL = ("gemma3", "paligemma", "qwen2_vl", "qwen2_5_vl")
ROWS = {name: [[3, "image", 2, "image", 4], [2, "image", 5]] for name in MULTIMODAL} | {
    name: [[9], [5]] for name in TEXT
}


def pair(name, implementation=hf.NAME, **changes):
    model = make(name, **changes)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)
    return model, other


def outputs(model, inputs):
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_same(model, other, inputs, valid=None):
    """Compares outputs at `valid` positions, and the gradients of every parameter for a random projection of them."""
    result, wanted = (outputs(m, inputs) for m in (model, other))
    valid = torch.ones(result.shape[:2], dtype=torch.bool) if valid is None else valid
    torch.testing.assert_close(result[valid], wanted[valid], rtol=1e-4, atol=1e-5)
    direction = random(*result[valid].shape, seed=9)
    for m, out in ((model, result), (other, wanted)):
        m.zero_grad(set_to_none=True)
        (out[valid] * direction).sum().backward()
    gradients = dict(other.named_parameters())
    scale = max(float(p.grad.norm()) for p in gradients.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        want = gradients[name].grad
        assert (parameter.grad is None) == (want is None), name
        if want is not None:
            # Some gradients are zero by symmetry and contain only noise: errors are relative to the largest gradient.
            error = float((parameter.grad - want).norm()) / max(float(want.norm()), 1e-3 * scale)
            assert error < 2e-4, f"{name}: relative error {error:.1e}"


def packed(name):
    """Two samples in one row, separated by position ids alone."""
    rows = [["image", 2, 3], [2, "image", "image", 5]] if name in MULTIMODAL else [[5], [9]]
    alone = [batch(name, [row]) for row in rows]
    across = {
        key: torch.cat([one[key] for one in alone], dim=0 if key in ("pixel_values", "image_grid_thw") else 1)
        for key in alone[0]
        if key != "attention_mask"
    }
    positions = torch.cat([torch.arange(one["input_ids"].shape[1]) for one in alone])[None]
    if "qwen" in name:  # text positions, then time, height and width
        positions = positions.expand(4, 1, -1).contiguous()
    return {**across, "position_ids": positions, "use_cache": False}, alone


def assert_same_generation(model, other, inputs, cache="dynamic"):
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
        **({"cache_implementation": "static"} if cache == "static" else {}),
    }
    result, wanted = (m.generate(**inputs, **options) for m in (model, other))
    assert torch.equal(result.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-5)


class Watch:
    """Counts calls: bitfield attention, and dense attention under a mask for more than one query."""

    def __init__(self, monkeypatch):
        self.sparse = self.dense = 0
        for name in ("bitfield_attention", "sdpa_attention_forward"):
            monkeypatch.setattr(hf, name, self.counted(name, getattr(hf, name)))

    def counted(self, name, function):
        def run(*args, **kwargs):
            if name == "bitfield_attention":
                self.sparse += 1
            elif args[4] is not None and args[1].shape[2] > 1:
                self.dense += 1
            return function(*args, **kwargs)

        return run
