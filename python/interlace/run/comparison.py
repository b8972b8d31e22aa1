"""Fingerprints that ranks compare before a step: the model, its layout, the options, the global batch.

Each rank hashes them to one number. Ranks compare these numbers when a step begins. They exchange the texts behind the
numbers only if the numbers differ, to report the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.comm.channels.base import Channel
from interlace.comm.process.agreement import Arguments, Fingerprint
from interlace.comm.transports.header import differences
from interlace.layout import Layout
from interlace.model import MultimodalModel


def of_model(mllm: MultimodalModel, layout: Layout, **options: object) -> Arguments:
    """Arguments of `parallelize` that must be equal on all ranks; values of weights are not compared."""
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in mllm.named_parameters()]
    return Arguments(
        modules=", ".join(mllm.modules_order()), parameters=Fingerprint(repr(parameters), []),
        layout=Fingerprint(repr(layout), []), **options,
    )  # fmt: skip


def of_samples(groups: Sequence[Sequence[Any]]) -> Arguments:
    """Arguments of a step that must be equal on all ranks: the global batch in its groups, without media data."""
    samples = [sample for group in groups for sample in group]
    media = [
        {
            name: [(m.shape, m.tokens, sorted(m.about.items())) for m in items]
            for name, items in sorted(s.media.items())
            if items
        }
        for s in samples
    ]
    sizes = [len(group) for group in groups]
    digests = [sample.digest for sample in samples]
    if None in digests:
        content = Fingerprint(f"{sizes} {media}", [ids for s in samples for ids in (s.input_ids, s.labels)])
    else:  # streams: a rank has only the tokens that it needs
        content = Fingerprint(f"{sizes} {media} {digests}", [])
    return Arguments(
        groups=len(sizes), samples=len(samples), tokens=sum(map(len, samples)), content=content,
    )  # fmt: skip


def disagreement(texts: Mapping[int, str]) -> str:
    """Differences between the texts of `Arguments` (by rank) and the first one; "" if there are none."""
    (first, mine), *others = texts.items()
    for rank, theirs in others:
        if theirs != mine:
            return "; ".join(differences(mine, theirs, f"on rank {first}", f"on rank {rank}"))
    return ""


def number(*parts: object) -> int:
    """48-bit hash of the arguments: a float64 holds it exactly."""
    text = "\n".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def begin(channel: Channel | None, digest: int, refused: bool, model: str, given: str) -> Callable[[], None]:
    """Start to compare the inputs of a step between ranks; the returned call finishes the comparison.

    channel: None if one process runs all ranks (no comparison needed). digest: `number` of all inputs. refused:
    this rank cannot run its batch. model, given: the texts behind the digest, sent only if digests differ.
    The call raises ValueError, on all ranks, if a rank refused or has other inputs; CommError if a rank is lost.
    """
    if channel is None or channel.world == 1:
        return lambda: None
    channel.begin(0)  # until the comparison has shown that all ranks have the same table
    numbers = torch.tensor([float(digest), float(refused)], dtype=torch.float64)
    pending = channel.start_all_gather(numbers, "start of the step")

    def compare() -> None:
        everyone = pending.wait()
        if refused:
            return  # the caller raises its own error
        if bad := everyone[:, 1].nonzero().flatten().tolist():
            ranks = ", ".join(map(str, bad))
            raise ValueError(f"rank {ranks} rejected its batch, so no rank runs this step: see the error of that rank")
        if not bool((everyone[:, 0] == everyone[0, 0]).all()):
            inputs = channel.exchange([model, given], "inputs of the ranks")
            wrong = disagreement({rank: model for rank, (model, _) in enumerate(inputs)})
            wrong = wrong or disagreement({rank: given for rank, (_, given) in enumerate(inputs)})
            raise ValueError(
                "the inputs of the ranks differ, so no rank runs this step: "
                f"{wrong or 'their step tables or schedules differ: use the same version of Interlace on all ranks'}"
            )
        channel.begin(digest)

    return compare
