"""Contenders of `bench.attention`: each reports why it does not apply, builds its mask, and runs.

    interlace       bitfield_attention with an AttentionPlan built from the mask
    sdpa_dense      scaled_dot_product_attention with the mask as a dense bool [1, 1, T, T]
    sdpa_causal     scaled_dot_product_attention(is_causal=True); the causal mask only
    sdpa_full       scaled_dot_product_attention without a mask; the full mask only
    flex            compiled FlexAttention, its BlockMask from mask.to_flex()
    flex_formula    compiled FlexAttention, mask_mod written by hand for each mask: one compilation per mask
    flex_flash      as flex_formula with kernel_options BACKEND=FLASH (FlashAttention-4), where that is installed
    flash_attn      FlashAttention (3, else 2) where it is installed and can say the mask

`build` creates the objects that a training step creates once per microbatch and uses in every layer. It is timed
separately.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attention_masks import FORMULAS, MASKS
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.masks import BitfieldMask, visible

PAIRS_AT_ONCE = 1 << 24  # pairs of tokens whose visibility is evaluated at a time


@dataclass
class Problem:
    """One mask at one length with its tensors: q, dout [1, Hq, T, D], k, v [1, Hkv, T, D], all on one device."""

    name: str
    length: int
    mask: BitfieldMask
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    backend: str | None = None  # of interlace; None = its own choice

    @classmethod
    def make(
        cls,
        name: str,
        length: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str | None = None,
    ) -> Problem:
        """Normally distributed tensors from a fixed seed; q, k and v require gradients."""
        generator = torch.Generator(device).manual_seed(0)

        def tensor(heads: int) -> Tensor:
            return torch.randn(1, heads, length, head_dim, generator=generator, device=device).to(dtype)

        q, k, v = (tensor(n).requires_grad_() for n in (heads, kv_heads, kv_heads))
        return cls(name, length, MASKS[name](length).to(device), q, k, v, tensor(heads), backend)

    @property
    def device(self) -> torch.device:
        return self.q.device


class Contender(NamedTuple):
    """why_not(problem): why it is left out, None if it runs. build(problem) -> state. forward(problem, state) -> out
    [1, Hq, T, D]. `trains`: True if it has a backward on this problem's device."""

    name: str
    why_not: Callable[[Problem], str | None]
    build: Callable[[Problem], Any]
    forward: Callable[[Problem, Any], Tensor]
    trains: Callable[[Problem], bool] = lambda problem: True


def _always(problem: Problem) -> str | None:
    return None


def _interlace(problem: Problem, plan: AttentionPlan) -> Tensor:
    out = bitfield_attention(problem.q, problem.k, problem.v, plan, backend=problem.backend)
    assert isinstance(out, Tensor)
    return out


# ---------------------------------------------------------------------- scaled_dot_product_attention


def dense_mask(mask: BitfieldMask) -> Tensor:
    """bool [B, 1, T, T], built a few rows at a time: to_dense needs several int64 [T, T] temporaries."""
    tokens = mask.tokens()
    dense = torch.empty(mask.batch, 1, mask.length, mask.length, dtype=torch.bool, device=mask.device)
    step = max(1, PAIRS_AT_ONCE // max(1, mask.length * mask.batch))
    for start in range(0, mask.length, step):
        rows = tokens(lambda field, at=slice(start, start + step): field[:, at]).rows()  # type: ignore[misc]
        dense[:, 0, start : start + step] = visible(rows, tokens.columns(), mask.sinks)
    return dense


def _sdpa(problem: Problem, **options: Any) -> Tensor:
    grouped = problem.q.shape[1] != problem.k.shape[1]
    return F.scaled_dot_product_attention(problem.q, problem.k, problem.v, enable_gqa=grouped, **options)


def _sdpa_dense(problem: Problem, dense: Tensor) -> Tensor:
    """Heads of k and v are repeated as in HuggingFace's models: no fused kernel supports both a mask and groups."""
    group = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (problem.k, problem.v))
    return F.scaled_dot_product_attention(problem.q, k, v, attn_mask=dense)


def _only(name: str) -> Callable[[Problem], str | None]:
    return lambda problem: None if problem.name == name else f"says the {name} mask only"


# ---------------------------------------------------------------------- FlexAttention


@cache
def _flex() -> tuple[Any, Any]:
    """(flex_attention, create_block_mask), both compiled for static shapes, FlexAttention's fastest mode."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Above its recompilation limit torch would run the eager, dense form and time that.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def _block_mask(problem: Problem, mask_mod: Any) -> Any:
    return _flex()[1](mask_mod, 1, None, problem.length, problem.length, device=str(problem.device))


def _flex_build(problem: Problem) -> Any:
    """Every companion is passed explicitly, so that masks of one length differ only in data and share a compilation."""
    mask, tokens = problem.mask, problem.mask.tokens()(lambda field: field.clone(memory_format=torch.contiguous_format))
    return _block_mask(problem, BitfieldMask.from_tokens(tokens, mask.sinks).to_flex())


def _flex_formula_build(problem: Problem) -> Any:
    return _block_mask(problem, FORMULAS[problem.name](problem.length, problem.device))


def _flex_forward(problem: Problem, block_mask: Any, **options: Any) -> Tensor:
    q, k, v = (problem.q, problem.k, problem.v)
    if not _on_gpu(problem):
        q, k, v = q.detach(), k.detach(), v.detach()  # on a CPU it rejects tensors that require gradients
    out = _flex()[0](q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1], **options)
    assert isinstance(out, Tensor)
    return out


def _on_gpu(problem: Problem) -> bool:
    return problem.device.type == "cuda"


def _no_flash_backend(problem: Problem) -> str | None:
    if not _on_gpu(problem):
        return "runs on CUDA devices only"
    return None if _installed("flash_attn.cute") else "flash_attn.cute (FlashAttention-4) is not installed"


# ---------------------------------------------------------------------- FlashAttention


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _no_flash_attn(problem: Problem) -> str | None:
    if problem.name not in ("full", "causal", "sliding_window", "document_causal"):
        return "cannot say this mask"
    if not _on_gpu(problem):
        return "runs on CUDA devices only"
    if problem.q.dtype == torch.float32:
        return "takes fp16 and bf16 only"
    if not (_installed("flash_attn_interface") or _installed("flash_attn")):
        return "neither flash_attn_interface (3) nor flash_attn (2) is installed"
    return None


def _flash_build(problem: Problem) -> Any:
    """Document boundaries, int32 [documents + 1], for a mask with documents."""
    if problem.name != "document_causal":
        return None
    assert problem.mask.doc is not None
    lengths = torch.bincount(problem.mask.doc[0].long())
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())


def _flash_forward(problem: Problem, documents: Any) -> Tensor:
    if _installed("flash_attn_interface"):
        import flash_attn_interface as flash  # type: ignore[import-not-found]
    else:
        import flash_attn as flash  # type: ignore[import-not-found]
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    causal = problem.name != "full"
    if documents is not None:
        ends, longest = documents
        out = flash.flash_attn_varlen_func(
            q[0], k[0], v[0], ends, ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        out = (out[0] if isinstance(out, tuple) else out).unsqueeze(0)
    else:
        window = problem.mask.window
        reach = (window - 1, 0) if isinstance(window, int) else (-1, -1)
        out = flash.flash_attn_func(q, k, v, causal=causal, window_size=reach)
        out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2)


INTERLACE = Contender("interlace", _always, lambda problem: AttentionPlan.build(problem.mask), _interlace)
PEERS = {
    peer.name: peer
    for peer in (
        Contender("sdpa_dense", _always, lambda problem: dense_mask(problem.mask), _sdpa_dense),
        Contender("sdpa_causal", _only("causal"), lambda problem: None, lambda p, _: _sdpa(p, is_causal=True)),
        Contender("sdpa_full", _only("full"), lambda problem: None, lambda p, _: _sdpa(p)),
        Contender("flex", _always, _flex_build, _flex_forward, _on_gpu),
        Contender("flex_formula", _always, _flex_formula_build, _flex_forward, _on_gpu),
        Contender(
            "flex_flash",
            _no_flash_backend,
            _flex_formula_build,
            lambda problem, state: _flex_forward(problem, state, kernel_options={"BACKEND": "FLASH"}),
        ),
        Contender("flash_attn", _no_flash_attn, _flash_build, _flash_forward),
    )
}


# ---------------------------------------------------------------------- truth


def visible_pairs(mask: BitfieldMask) -> int:
    """Pairs (query, key) that the mask allows, counted exactly from its rule, a few rows at a time."""
    tokens = mask.tokens()
    step = max(1, PAIRS_AT_ONCE // max(1, mask.length * mask.batch))
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for start in range(0, mask.length, step):
        rows = tokens(lambda field, at=slice(start, start + step): field[:, at]).rows()  # type: ignore[misc]
        total += visible(rows, tokens.columns(), mask.sinks).sum()
    return int(total)


def sampled_rows(problem: Problem, count: int = 32) -> tuple[Tensor, Tensor]:
    """(rows int64 [n], exact output fp32 [1, Hq, n, D]) of evenly spaced queries, by dense arithmetic in fp32."""
    rows = torch.linspace(0, problem.length - 1, min(count, problem.length), device=problem.device).long().unique()
    q, k, v = (x.detach().float() for x in (problem.q[:, :, rows], problem.k, problem.v))
    grouped = q.reshape(1, k.shape[1], -1, rows.numel(), q.shape[3])  # query heads grouped by their shared key head
    scores = grouped @ k.unsqueeze(2).mT * q.shape[3] ** -0.5
    tokens = problem.mask.tokens()
    seen = visible(tokens(lambda field: field[:, rows]).rows(), tokens.columns(), problem.mask.sinks)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return rows, (weights @ v.unsqueeze(2)).reshape(q.shape)
