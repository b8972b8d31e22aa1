"""What the ranks of a step must have alike: the model and how it is cut, the options, the global batch.

Each rank makes one number of it, which they compare when a step begins. Only if the numbers differ do they tell each
other the texts behind them, to say what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.comm.agreement import Fingerprint
from interlace.comm.channel import Channel
from interlace.comm.transports.base import Arguments
from interlace.comm.transports.header import differences
from interlace.layout import Layout
from interlace.model import MultimodalModel


def of_model(mllm: MultimodalModel, layout: Layout, **options: object) -> Arguments:
    """What every rank passes alike to `parallelize`, but for the values of weights."""
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in mllm.named_parameters()]
    return Arguments(
        modules=", ".join(mllm.modules_order()), parameters=Fingerprint(repr(parameters), []),
        layout=Fingerprint(repr(layout), []), **options,
    )  # fmt: skip


def of_samples(groups: Sequence[Sequence[Any]]) -> Arguments:
    """What every rank passes alike to a step: the global batch in its groups, but for the data of media."""
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
    else:  # of streams, whose tokens are where they are needed
        content = Fingerprint(f"{sizes} {media} {digests}", [])
    return Arguments(
        groups=len(sizes), samples=len(samples), tokens=sum(map(len, samples)), content=content,
    )  # fmt: skip


def disagreement(said: Mapping[int, str]) -> str:
    """How the texts of `Arguments`, by rank, differ from the first one; "" if they do not."""
    (first, mine), *others = said.items()
    for rank, theirs in others:
        if theirs != mine:
            return "; ".join(differences(mine, theirs, f"on rank {first}", f"on rank {rank}"))
    return ""


def number(*parts: object) -> int:
    """48 bits of what is given: a float64 holds them."""
    text = "\n".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def begin(channel: Channel | None, digest: int, refused: bool, model: str, given: str) -> Callable[[], None]:
    """Begin to compare what the ranks of a step were given; the returned call ends it.

    channel: None where one process plays all ranks, which then have the same. digest: `number` of all of it. refused:
    this rank cannot run its batch. model, given: the texts behind the digest, which travel only if digests differ.
    The call raises ValueError, on all ranks alike, if a rank refused or was given something else; CommError if one is
    lost.
    """
    if channel is None or channel.world == 1:
        return lambda: None
    channel.begin(0)  # until it is known that all ranks have the same table
    numbers = torch.tensor([float(digest), float(refused)], dtype=torch.float64)
    pending = channel.start_all_gather(numbers, "start of the step")

    def compare() -> None:
        everyone = pending.wait()
        if refused:
            return  # it says so itself
        if bad := everyone[:, 1].nonzero().flatten().tolist():
            ranks = ", ".join(map(str, bad))
            raise ValueError(f"rank {ranks} refused its batch, so no rank runs this step: see its error")
        if not bool((everyone[:, 0] == everyone[0, 0]).all()):
            said = channel.exchange([model, given], "what the ranks were given")
            wrong = disagreement({rank: model for rank, (model, _) in enumerate(said)})
            wrong = wrong or disagreement({rank: given for rank, (_, given) in enumerate(said)})
            raise ValueError(
                "the ranks were not given the same, so none runs this step: "
                f"{wrong or 'their tables differ: do they run one version of the program?'}"
            )
        channel.begin(digest)

    return compare
