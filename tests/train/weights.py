"""Helpers of test_weights.py and of other tests."""

from __future__ import annotations

from typing import Any

import torch

from interlace.run.execute.ranks import make_ranks
from interlace.run.execute.weights import Pieces
from interlace.run.graph import stage_graph


class OfOneRank:
    """The part of `ParallelModel` that `initialize` needs: one rank of a layout, without the others."""

    def __init__(self, model: Any, layout: Any, rank: int) -> None:
        graph, device = stage_graph(model, layout), torch.device("cpu")
        ranks = make_ranks(model, graph, [rank], "none", set(), Pieces(), device)
        self.mllm, self.rank = model, ranks[rank]
        self.stages: dict[int, Any] = {rank: self.rank.stages}

    def named_parameters(self) -> Any:
        return self.rank.own.items()

    def regions(self) -> Any:
        return self.rank.cut
