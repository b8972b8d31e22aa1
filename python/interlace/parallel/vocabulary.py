"""Embeddings and the head of a language model, cut by their words: rank r has the rows of its words of either weight.

    table = VocabularyEmbedding(model.embed_tokens, ranks)    # ids [...] -> [..., D], the same on every rank
    head = VocabularyHead.from_linear(model.lm_head, ranks)   # [..., D]  -> logits [..., V] of all words, on every rank

Words need not divide among the ranks. One weight that serves as both stays one piece. A loss needs no logits of all
words: `interlace.model.loss.head_cross_entropy` makes those of this rank's words, a few rows at a time.
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
    """This rank's words of an nn.Embedding, or of one that scales what it looks up (`embed_scale`: Gemma, BART).

    ids int [...], the same on every rank. Returns [..., embedding_dim] on every rank: each looks up the ids that are
    its words, others are 0, and the ranks sum. Raises RuntimeError for an id that is no word (on a GPU: asserts).
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    weight: nn.Parameter

    def __init__(self, whole: nn.Embedding, ranks: Ranks) -> None:
        """A copy of this rank's piece of `whole`. Raises ValueError where there are fewer words than ranks."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.ranks = whole.padding_idx, ranks
        self.sizes = whole.num_embeddings, whole.embedding_dim
        if self.num_embeddings < ranks.world:
            raise ValueError(f"{self.num_embeddings} words do not reach for {ranks.world} ranks")
        scale: Any = getattr(whole, "embed_scale", None)
        self.narrow_scale = isinstance(scale, Tensor)  # Gemma's, which has the dtype of the weight
        # Its own number where it has one: the tensor of a model on meta has no value yet.
        self.scale = None if scale is None else float(getattr(whole, "scalar_embed_scale", scale))
        self.take(whole)
        self.first = self.region("weight").boxes[0].offsets[0]  # of this rank's words

    def forward(self, ids: Tensor) -> Tensor:
        known = (ids >= 0) & (ids < self.num_embeddings)
        # Such an id would be nobody's word, and its embedding 0 without a word. Does not wait for a GPU.
        torch._assert_async(known.all(), f"an id is outside the vocabulary of {self.num_embeddings} words")
        mine, padding = ids - self.first, None
        others = (mine < 0) | (mine >= len(self.weight))
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < len(self.weight):
            padding = self.padding_idx - self.first  # without a gradient
        rows = embedding(mine.masked_fill(others, 0), self.weight, padding)
        if self.scale is not None:
            exact = torch.full((), self.scale, dtype=torch.float32, device=rows.device)
            rows = rows * (exact.to(rows.dtype) if self.narrow_scale else self.scale)
        return sum_over_ranks(rows.masked_fill(others.unsqueeze(-1), 0), self.ranks)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.ranks.rank}/{self.ranks.world}"


class VocabularyHead(ColumnParallelLinear):
    """This rank's words of the nn.Linear that makes logits. x [..., D]; returns [..., V] on every rank."""

    equal = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, sequence_parallel=False, gather_output=True, **options)

    @property
    def first(self) -> int:
        """The first of this rank's words."""
        return self.region("weight").boxes[0].offsets[0]


def vocabulary_plan(model: nn.Module, path: str = "") -> dict[str, str]:
    """{path: "vocabulary"} of the embeddings and the head of a HuggingFace language model, as far as they have weights:
    a stage may lack either.

    Nothing where one of them is more than an nn.Embedding, scaled or not, or an nn.Linear: they may be one weight, on
    several stages, so both are cut or neither is. path: of the model.
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
    """Whether `part` is an nn.Linear or an nn.Embedding (`kind`) whose piece does what it does."""
    if part is None or "forward" in vars(part) or has_hooks(part) or not is_plain(part, kind):
        return False
    return not (
        isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq or part.sparse)
    )


def is_plain(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `part` is of the class nn.Linear or nn.Embedding (`kind`), or an nn.Embedding that scales."""
    return type(part) is kind or (kind is nn.Embedding and isinstance(part, nn.Embedding) and _is_scaled(type(part)))


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is hooked to the module itself, which a layer in its place would not have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _is_scaled(kind: type[nn.Module]) -> bool:
    """Whether all that a kind of embedding adds to nn.Embedding is a scale. Told by its code: a stage that lacks the
    embedding of its model must come to the same answer."""
    try:
        code = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return kind.__bases__ == (nn.Embedding,) and code.count("\n") == 2 and _SCALED.search(code) is not None
