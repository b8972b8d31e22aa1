"""Fingerprints that ranks compare before a step: the model, its layout, the options, the global batch.

Each rank hashes them to one number. Ranks compare these numbers when a step begins. They exchange the texts behind the
numbers only if the numbers differ, to report the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm.channels.base import Channel
from interlace.comm.process.agreement import Arguments, Fingerprint
from interlace.comm.process.reductions import digest_of
from interlace.comm.transports.header import differences
from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.run.tables.table import Samples


def of_model(mllm: MultimodalModel, layout: Layout, **options: object) -> Arguments:
    """Arguments of `parallelize` that must be equal on all ranks; values of weights are not compared."""
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in mllm.named_parameters()]
    return Arguments(
        modules=", ".join(mllm.modules_order()), parameters=Fingerprint(repr(parameters), []),
        layout=Fingerprint(repr(layout), []), **options,
    )  # fmt: skip


def of_samples(groups: Sequence[Samples]) -> Arguments:
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


def disagreement(texts: Sequence[str]) -> str:
    """Differences between the texts of `Arguments`, by rank, and the first one; "" if there are none."""
    for rank, theirs in enumerate(texts):
        if theirs != texts[0]:
            return "; ".join(differences(texts[0], theirs, "on rank 0", f"on rank {rank}"))
    return ""


def number(*parts: object) -> int:
    """48-bit hash of the arguments: a float64 holds it exactly."""
    return digest_of("\n".join(map(str, parts)))


class Comparison:
    """Comparison of the inputs of a step between ranks; in flight from construction to `finish`.

    channel: None if one process runs all ranks (no comparison needed). digest: `number` of all inputs; None: this rank
    cannot run its batch. model, given: the texts behind the digest, sent only if digests differ.
    """

    def __init__(self, channel: Channel | None, digest: int | None, model: str, given: str) -> None:
        self._channel = None if channel is None or channel.world == 1 else channel
        self._digest, self._texts = digest, [model, given]
        if self._channel is not None:
            self._channel.begin(0)  # until the comparison has shown that all ranks have the same table
            numbers = torch.tensor([float(digest or 0), float(digest is None)], dtype=torch.float64)
            self._pending = self._channel.start_all_gather(numbers, "start of the step")

    def finish(self) -> None:
        """Raises ValueError, on all ranks, if a rank refused or has other inputs; CommError if a rank is lost. A rank
        that refused raises its own error afterwards."""
        if self._channel is None:
            return
        everyone = self._pending.wait()
        if self._digest is None:
            return
        if bad := everyone[:, 1].nonzero().flatten().tolist():
            ranks = ", ".join(map(str, bad))
            raise ValueError(f"rank {ranks} rejected its batch, so no rank runs this step: see the error of that rank")
        if not bool((everyone[:, 0] == everyone[0, 0]).all()):
            inputs = self._channel.exchange(self._texts, "inputs of the ranks")
            models, batches = zip(*inputs, strict=True)
            wrong = disagreement(models) or disagreement(batches)
            raise ValueError(
                "the inputs of the ranks differ, so no rank runs this step: "
                f"{wrong or 'their step tables or schedules differ: use the same version of Interlace on all ranks'}"
            )
        self._channel.begin(self._digest)
