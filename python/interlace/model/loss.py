"""Language model loss: sum of the cross entropy over the vocabulary, without all logits in memory at once.

At 32,768 tokens and 128,000 words, the logits take 16 GiB in fp32, and their gradient the same again. Large logits are
therefore computed a few rows at a time, and again in backward. This adds a third to the head's work.
`torch.nn.functional.linear_cross_entropy` (from 2.13) computes the gradients in the forward pass instead. That keeps a
gradient of the size of the head for every chunk that waits for its backward.

Ranks that share a head split by words each compute the logits of their own words. They exchange the log of the sum of
exponentials and the target's logit, once for all rows. In backward they sum their gradients of the hidden states. The
sum for some rows overlaps with the gradients of the head and of the next rows. torch's `loss_parallel` and
Megatron-LM's loss take logits of all rows. Liger-Kernel and Apple's cut cross-entropy need a GPU with Triton. This loss
runs wherever torch runs, for any number of words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from interlace.comm import all_reduce
from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.overlap.deferred import DeferredForward
from interlace.model.sample import IGNORE
from interlace.parallel.mappings import Ranks
from interlace.parallel.vocabulary import VocabularyHead

Head = nn.Linear | VocabularyHead

LOGITS_BYTES = 256 << 20
"""Maximum size of fp32 logits in memory at once [bytes]; twice as much while their exponentials are summed."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over valid targets, fp32 scalar in nats; 0 (with a graph) if there are no targets.

    logits: [B, T, V], or [1, n, V] for the n valid targets alone.
    labels: [B, T], already shifted.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).to(logits.device)
    if len(flat) != len(wanted):
        wanted = wanted[wanted != IGNORE]
    return cross_entropy(flat.float(), wanted, reduction="sum", ignore_index=IGNORE)


def head_of(module: nn.Module) -> Head | None:
    """The layer that makes logits, if it is plain: no subclass, no hooks, not compiled. Otherwise None."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    if type(head) not in (nn.Linear, VocabularyHead) or set(head._parameters) != {"weight", "bias"}:
        return None
    replaced = "forward" in vars(head) and not isinstance(vars(head)["forward"], DeferredForward)
    changed = replaced or head._compiled_call_impl or head._forward_hooks or head._forward_pre_hooks
    return None if changed else head


def head_cross_entropy(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """`cross_entropy_sum` of head(hidden), with logits in memory only for as many rows as fit into `LOGITS_BYTES`.

    hidden: [n, K].
    head: K -> V.
    targets: int64 [n], all valid.
    With a VocabularyHead, all ranks pass the same hidden and targets. Each rank gets the loss, the whole gradient of
    `hidden`, and the gradient of its own shard of the head.
    """
    words = None
    if isinstance(head, VocabularyHead) and head.ranks.world > 1:
        words = Words(head.ranks, head.first, max(head.ranks.counts(head.out_features)))
        check_reverse_mode("head_cross_entropy", hidden, head.weight)
        known = (targets >= 0) & (targets < head.out_features)
        # Such a target would belong to no rank and silently get logit 0. This assertion does not synchronize with a
        # GPU.
        torch._assert_async(known.all(), f"a target is outside the vocabulary of {head.out_features} words")
    elif len(hidden) <= at_once(head.out_features):
        return cross_entropy(head(hidden).float(), targets, reduction="sum")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    total: Tensor = _HeadCrossEntropy.apply(hidden, head.weight, head.bias, targets, dtype, words)
    return total


class Words(NamedTuple):
    """Split of a head by words: the ranks, the first word of this rank, and the largest number of words of any rank."""

    ranks: Ranks
    first: int
    most: int


def at_once(words: int) -> int:
    """Maximum rows whose logits over `words` words may be in memory at once."""
    return max(1, LOGITS_BYTES // (4 * words))


def _parts(rows: int, words: int) -> Iterator[slice]:
    step = at_once(words)
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


class _HeadCrossEntropy(torch.autograd.Function):
    """Autograd function of the chunked loss. words: None if this rank has all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        words: Words | None,
    ) -> Tensor:
        norms = torch.empty(len(hidden), device=hidden.device)  # log of the sum of exponentials
        target_logits = torch.empty_like(norms)  # the target's logit; 0 if another rank has it
        with torch.autocast(hidden.device.type, enabled=False):
            made = [None if x is None else x.to(dtype) for x in (hidden, weight, bias)]
            for part in _parts(len(hidden), len(weight)):
                logits = _logits(part, *made)
                norms[part] = logits.logsumexp(1)
                at, here = _places(targets[part], len(weight), words)
                target_logits[part] = torch.where(here, logits.gather(1, at), 0).squeeze(1)
        if words is not None and len(hidden):
            everyone = words.ranks.gather(torch.stack([norms, target_logits]).unsqueeze(0), 0)
            norms, target_logits = everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.dtype, ctx.words = dtype, words
        return (norms - target_logits).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if to_hidden else None
        # Accumulated in fp32: rounding errors would add up over many parts.
        d_weight = torch.zeros(weight.shape, device=weight.device) if to_weight else None
        d_bias = torch.zeros(bias.shape, device=weight.device) if to_bias else None
        sums: list[Any] = []
        with torch.autocast(hidden.device.type, enabled=False):
            rows, words, shift = (None if x is None else x.to(ctx.dtype) for x in (hidden, weight, bias))
            assert rows is not None and words is not None
            # Ranks sum part by part. All use the same parts, although one rank may have one word more than another.
            for part in _parts(len(hidden), len(weight) if ctx.words is None else ctx.words.most):
                d_logits = _logits(part, rows, words, shift).sub_(norms[part, None]).exp_()
                at, here = _places(targets[part], len(weight), ctx.words)
                d_logits.scatter_(1, at, d_logits.gather(1, at) - here.float()).mul_(gradient)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                narrow = d_logits.to(ctx.dtype)
                if d_hidden is not None:
                    d_hidden[part] = narrow @ words
                    if ctx.words is not None:  # overlaps with the product of the weight gradient and with the next part
                        whole = d_hidden[part]
                        sums.append(all_reduce(whole, group=ctx.words.ranks.transport(whole), async_op=True))
                if d_weight is None:
                    continue
                if ctx.dtype is torch.float32:
                    d_weight.addmm_(narrow.T, rows[part])
                else:
                    d_weight += narrow.T @ rows[part]
        for handle in sums:
            handle.wait()
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _places(targets: Tensor, count: int, words: Words | None) -> tuple[Tensor, Tensor]:
    """Index of each target among the `count` words of this rank, and whether it is one of them; both [n, 1]."""
    at = targets[:, None]
    if words is None:
        return at, torch.ones_like(at, dtype=torch.bool)
    at = at - words.first
    here = (at >= 0) & (at < count)
    return at.masked_fill(~here, 0), here


def _logits(part: slice, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert hidden is not None and weight is not None
    return linear(hidden[part], weight, bias).float()
