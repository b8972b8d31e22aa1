"""What the ranks of a step must have alike, beyond what headers of tensors say; compared where ranks talk anyway.

Before a step starts: the model and how it is cut, the options, and within a replica the samples. When it is over, with
the loss and the gradient norm: the sums over ranks that were made meanwhile. Those have no header, and reading one on a
GPU would wait for it, so each rank keeps a running digest of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from interlace.comm.agreement import Fingerprint
from interlace.comm.transports.base import Arguments
from interlace.comm.transports.header import differences
from interlace.model import MultimodalModel
from interlace.plan import ParallelPlan


def of_model(mllm: MultimodalModel, plan: ParallelPlan, **options: object) -> Arguments:
    """What every rank passes alike to `parallelize`, but for the values of weights."""
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in mllm.named_parameters()]
    return Arguments(
        modules=", ".join(mllm.modules_order()), parameters=Fingerprint(repr(parameters), []),
        plan=Fingerprint(repr(plan), []), **options,
    )  # fmt: skip


def of_samples(groups: Sequence[Sequence[Any]]) -> Arguments:
    """What every rank of a replica passes alike to a step: its microbatches, but for the data of media."""
    samples = [sample for group in groups for sample in group]
    media = [
        {name: [(m.shape, m.tokens) for m in items] for name, items in sorted(s.media.items()) if items}
        for s in samples
    ]
    sizes = [len(group) for group in groups]
    return Arguments(
        microbatches=len(sizes), samples=len(samples), tokens=sum(len(sample.input_ids) for sample in samples),
        content=Fingerprint(f"{sizes} {media}", [ids for s in samples for ids in (s.input_ids, s.labels)]),
    )  # fmt: skip


def disagreement(said: Mapping[int, str]) -> str:
    """How the texts of `Arguments`, by rank, differ from the first one; "" if they do not."""
    (first, mine), *others = said.items()
    for rank, theirs in others:
        if theirs != mine:
            return "; ".join(differences(mine, theirs, f"on rank {first}", f"on rank {rank}"))
    return ""


class Reductions:
    """The sums over ranks that one rank took part in, by the ranks that did: how many, a digest, and the last one."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, str, str]] = {}

    def add(self, ranks: Sequence[int], key: str, tensor: Tensor) -> None:
        group = ",".join(map(str, ranks))
        count, digest, _ = self._made.get(group, (0, "", ""))
        this = f"{key}, {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        self._made[group] = count + 1, hashlib.blake2b(f"{digest} {this}".encode(), digest_size=8).hexdigest(), this

    def text(self) -> str:
        return "\n".join(f"{group}\t{count}\t{digest}\t{this}" for group, (count, digest, this) in self._made.items())

    @staticmethod
    def disagreement(said: Sequence[str]) -> str:
        """How the texts of all ranks, in their order, contradict each other; "" if they do not."""
        made: list[dict[str, tuple[str, str, str]]] = []
        for rank, text in enumerate(said):
            rows = [line.split("\t") for line in text.splitlines()]
            if not all(len(row) == 4 and _is_group(row[0], len(said)) for row in rows):
                return f"what rank {rank} says of its sums cannot be read"
            made.append({group: (count, digest, this) for group, count, digest, this in rows})
        for group in dict.fromkeys(group for mine in made for group in mine):
            ranks = [int(rank) for rank in group.split(",")]
            first, *others = ((rank, made[rank].get(group, ("no", "", "none"))) for rank in ranks)
            for rank, sums in others:
                if sums != first[1]:
                    (count, _, last), (other, _, its_last) = first[1], sums
                    return (
                        f"ranks {group} have not summed the same: rank {first[0]} made {count} sums, the last of "
                        f"{last}; rank {rank} made {other}, the last of {its_last}"
                    )
        return ""


def _is_group(text: str, world: int) -> bool:
    return all(rank.isdecimal() and len(rank) < 10 and int(rank) < world for rank in text.split(","))
