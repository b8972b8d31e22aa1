"""Vocabulary-parallel embedding and head of a language model: each rank holds the weight rows of its tokens.

    table = VocabularyEmbedding(model.embed_tokens, ranks)    # ids [...] -> [..., D], the same on every rank
    head = VocabularyHead.from_linear(model.lm_head, ranks)   # [..., D]  -> logits [..., V] of all ids, on every rank

The vocabulary need not be divisible by the ranks. A tied weight of both stays one tensor. A loss does not need all
logits: `interlace.model.loss.head_cross_entropy` computes those of this rank's part of the vocabulary, a few rows at a
time.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from interlace.parallel.layer import ParallelLayer
from interlace.parallel.linear import ColumnParallelLinear
from interlace.parallel.mappings import Ranks, sum_over_ranks

_SCALED = re.compile(r"\n +return super\(\)\.forward\(\w+\) \* self\.embed_scale(\.to\(self\.weight\.dtype\))?\s*$")


class VocabularyEmbedding(ParallelLayer):
    """This rank's rows of an nn.Embedding, or of one that scales its result (`embed_scale`: Gemma, BART).

    ids int [...], equal on all ranks. Returns [..., embedding_dim] on every rank. Each rank looks up the ids of its own
    rows, sets the others to 0, and the ranks sum. Raises RuntimeError for an id out of range (on a GPU: asserts).
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    weight: nn.Parameter

    def __init__(self, layer: nn.Embedding, ranks: Ranks) -> None:
        """A copy of this rank's rows of `layer`. Raises ValueError if the vocabulary has fewer rows than there are
        ranks.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx, self.ranks = layer.padding_idx, ranks
        self.sizes = layer.num_embeddings, layer.embedding_dim
        if self.num_embeddings < ranks.world:
            raise ValueError(
                f"the vocabulary has {self.num_embeddings} tokens, fewer than {ranks.world} ranks: use fewer ranks"
            )
        scale: Any = getattr(layer, "embed_scale", None)
        self.narrow_scale = isinstance(scale, Tensor)  # Gemma: has the dtype of the weight
        # Prefer `scalar_embed_scale`: on meta the tensor has no value yet.
        self.scale = None if scale is None else float(getattr(layer, "scalar_embed_scale", scale))
        self.take(layer)
        self.first = self.region("weight").boxes[0].offsets[0]  # this rank's first token id

    def forward(self, ids: Tensor) -> Tensor:
        valid = (ids >= 0) & (ids < self.num_embeddings)
        # Otherwise no rank would own the id, and its embedding would silently be 0. Does not wait for a GPU.
        torch._assert_async(valid.all(), f"an id is outside the vocabulary of {self.num_embeddings} tokens")
        local_ids, padding = ids - self.first, None
        outside = (local_ids < 0) | (local_ids >= len(self.weight))
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < len(self.weight):
            padding = self.padding_idx - self.first  # gets no gradient
        rows = embedding(local_ids.masked_fill(outside, 0), self.weight, padding)
        if self.scale is not None:
            exact = torch.full((), self.scale, dtype=torch.float32, device=rows.device)
            rows = rows * (exact.to(rows.dtype) if self.narrow_scale else self.scale)
        return sum_over_ranks(rows.masked_fill(outside.unsqueeze(-1), 0), self.ranks)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.ranks.rank}/{self.ranks.world}"


class VocabularyHead(ColumnParallelLinear):
    """This rank's rows of the nn.Linear that computes logits. x [..., D]; returns [..., V] on every rank."""

    equal = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, sequence_parallel=False, gather_output=True, **options)

    @property
    def first(self) -> int:
        """The first token id of this rank."""
        return self.region("weight").boxes[0].offsets[0]


def vocabulary_plan(model: nn.Module, path: str = "") -> dict[str, str]:
    """{path: "vocabulary"} of the embeddings and the head of a HuggingFace language model.

    Includes only modules that have weights: a pipeline stage may lack either. Empty if one of them is not an
    nn.Embedding (scaled or not) or nn.Linear. They may be one tied weight on several stages, so either both are cut or
    neither.

    path: of the model.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if not (can_be_cut(table, nn.Embedding) and can_be_cut(head, nn.Linear)):
        return {}
    outer = f"{path}." if path else ""
    return {
        f"{outer}{name}": "vocabulary"
        for name, part in model.named_modules()
        if part in (table, head) and next(part.parameters(), None) is not None
    }


def can_be_cut(part: nn.Module | None, kind: type[nn.Module]) -> bool:
    """True if `part` is an nn.Linear or an nn.Embedding (`kind`) that can be replaced by its shard."""
    if part is None or "forward" in vars(part) or has_hooks(part) or not is_plain(part, kind):
        return False
    return not (
        isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq or part.sparse)
    )


def is_plain(part: nn.Module, kind: type[nn.Module]) -> bool:
    """True if `part` is exactly nn.Linear or nn.Embedding (`kind`), or an nn.Embedding that only adds a scale."""
    return type(part) is kind or (kind is nn.Embedding and isinstance(part, nn.Embedding) and _is_scaled(type(part)))


def has_hooks(module: nn.Module) -> bool:
    """True if the module itself has hooks. A layer that replaces it would lose them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _is_scaled(kind: type[nn.Module]) -> bool:
    """True if the class adds only a scale to nn.Embedding.

    Decided from its source code: a stage without the embedding must come to the same answer.
    """
    try:
        code = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return kind.__bases__ == (nn.Embedding,) and code.count("\n") == 2 and _SCALED.search(code) is not None
