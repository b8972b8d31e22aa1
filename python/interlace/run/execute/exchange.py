"""Exchange of streams: offers of readers go to all ranks, items to the ranks that compute with them.

    exchange = Exchange(transport, limit=1 << 30)
    messages = exchange.gather(mine, "...")              one small all-gather: every rank's message by rank
    held = exchange.move(offers, samples, needs)     one all-to-all: this rank's part of the batch

The offer of a sample holds its lengths, shapes, the positions of its items, and a digest. All ranks make the same
tables from the offers, so each rank can compute all transfers before they start. Text is sent as int32, media in the
dtype that they were decoded to, each part in a multiple of 8 bytes. Messages are JSON. They are validated before use,
and nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interlace.balance.rearrange import AllToAllPlan
from interlace.comm.collectives.rows import all_gather_into_tensor, all_to_all_single
from interlace.comm.process.errors import CommError
from interlace.comm.transports.base import Transport
from interlace.model import Media, Sample, SampleOutline
from interlace.model.inputs.placeholders import Ids, item_starts
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run.tables.needs import Needs

ALIGNED = 8  # bytes: alignment of each part, enough for every dtype
MIB = 1 << 20
_HEAD = 8  # bytes of the length field of a message
_LONGEST = 1 << 28  # bytes of a message at most
_FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, eq=False)
class Offer:
    """Metadata of a sample that a rank has read, sent to all ranks. dtypes: encoder -> dtypes of its media."""

    reader: int
    outline: SampleOutline
    dtypes: Mapping[str, Sequence[torch.dtype]]

    def sizes(self, parts: Sequence[str]) -> list[int]:
        """Bytes that each part takes in a transfer (see `interlace.run.tables.needs`)."""
        text = 2 * _INT32.bits // 8 * self.outline.length
        return [text if part == LANGUAGE_MODEL else sum(self.item_bytes(part)) for part in parts]

    def item_bytes(self, encoder: str) -> list[int]:
        """Bytes that each of its media of an encoder takes in a transfer."""
        items = self.outline.media.get(encoder, ())
        return [
            -(-int(np.prod(item.shape)) * dtype.itemsize // ALIGNED) * ALIGNED
            for item, dtype in zip(items, self.dtypes.get(encoder, ()), strict=True)
        ]

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.sizes((LANGUAGE_MODEL, *self.outline.media)))


def offered(sample: Sample, placeholders: Mapping[str, Ids]) -> list[Any]:
    """The offer of a sample that this rank has read and decoded, as JSON values; see `offer_of`.

    placeholders: encoder -> its token ids. Raises ValueError for ids that do not fit in 32 bits, and for media without
    a place in the tokens.
    """
    for what, ids in (("input_ids", sample.input_ids), ("labels", sample.labels)):
        if int(ids.min()) < _INT32.min or int(ids.max()) > _INT32.max:
            raise ValueError(f"sample {sample.name!r}: {what} do not fit in 32 bits, in which they are sent")
    media: dict[str, list[Any]] = {}
    for name, items in sample.media.items():
        if not items:
            continue
        if name not in placeholders:
            raise ValueError(f"sample {sample.name!r} has media of {name!r}, but the model has no such encoder")
        try:
            starts = item_starts(sample.input_ids, placeholders[name], [item.tokens for item in items])
        except ValueError as error:
            raise ValueError(f"sample {sample.name!r}, {name}: {error}: use the model's placeholder") from None
        media[name] = []
        for item, start in zip(items, starts, strict=True):
            if item.data is None:
                raise ValueError(f"{item} has no data: a reader must return samples that it can decode")
            about, dtype = {key: list(value) for key, value in item.about.items()}, str(item.data.dtype)
            media[name].append([list(item.shape), item.tokens, start, dtype.removeprefix("torch."), about])
    return [len(sample), sample.targets, digest_of(sample.input_ids, sample.labels), media, sample.name]


def digest_of(ids: Tensor, labels: Tensor) -> int:
    """64-bit hash of a sample's tokens."""
    hasher = hashlib.blake2b(ids.numpy().tobytes(), digest_size=8)
    hasher.update(labels.numpy().tobytes())
    return int.from_bytes(hasher.digest(), "little")


def offer_of(reader: int, values: Any, encoders: Sequence[str]) -> Offer:
    """Validates and parses the output of `offered` from rank `reader`. Raises CommError for an invalid message."""
    try:
        length, targets, digest, media, name = values
        for number in (length, targets, digest):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a count")
        if not length or targets > length or digest >> 64 or not isinstance(name, str) or set(media) - set(encoders):
            raise ValueError("invalid lengths, name or encoders")
        items = {
            key: [
                Media(shape, tokens, about={k: tuple(v) for k, v in about.items()})
                for shape, tokens, _, _, about in all_of
            ]
            for key, all_of in media.items()
        }
        dtypes = {key: [_FLOATS[dtype] for _, _, _, dtype, _ in all_of] for key, all_of in media.items()}
        starts = {key: [start for _, _, start, _, _ in all_of] for key, all_of in media.items()}
        for key, all_of in items.items():
            for item, start in zip(all_of, starts[key], strict=True):
                if type(start) is not int or not 0 <= start <= length - item.tokens:
                    raise ValueError(f"an item at {start!r} is outside the sample")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommError(
            f"rank {reader} sent an invalid sample ({error}): install the same version on all ranks"
        ) from None
    return Offer(reader, SampleOutline(length, targets, items, digest, name, starts), dtypes)


@dataclass(frozen=True, eq=False)
class Moved:
    """A batch on one rank after its exchange. samples: in the batch's order, see
    `interlace.run.tables.batch.Dispatched`. sent, received: bytes of this rank. transfers: of all ranks, in bytes."""

    samples: list[Sample | SampleOutline]
    sent: int
    received: int
    transfers: AllToAllPlan


class Exchange:
    """One rank's end of the exchange. limit: most bytes that a rank sends or receives for one step. Not thread-safe.

    All methods raise CommError, with the rank's number, if a rank is lost or late.
    """

    def __init__(self, transport: Transport, limit: int) -> None:
        self.transport, self.limit = transport, limit
        self.rank, self.world = transport.rank, transport.world
        self._room = 4096

    def gather(self, value: Any, what: str) -> list[Any]:
        """The `value` (JSON) of every rank, by rank. One all-gather; a second one if a message is larger than all
        earlier ones. what: name for errors."""
        raw = json.dumps(value).encode()
        if len(raw) > _LONGEST:
            raise ValueError(f"{what}: a message has {len(raw)} bytes, the limit is {_LONGEST}")
        while True:
            messages = self._gather(raw[: self._room - _HEAD], len(raw), what)
            longest = max(int(row[:_HEAD].view(torch.int64)[0]) for row in messages)
            if not 0 <= longest <= _LONGEST:
                raise CommError(
                    f"rank {self.rank}, {what}: a message claims a length of {longest} bytes, the limit is {_LONGEST}"
                )
            if longest <= self._room - _HEAD:
                break
            self._room = 1 << (longest + _HEAD - 1).bit_length()  # the same on every rank
        texts = []
        for rank, row in enumerate(messages):
            size = int(row[:_HEAD].view(torch.int64)[0])
            try:
                texts.append(json.loads(row[_HEAD : _HEAD + size].numpy().tobytes()))
            except ValueError as error:
                raise CommError(f"rank {self.rank}, {what}: unreadable message from rank {rank} ({error})") from None
        return texts

    def _gather(self, raw: bytes, size: int, what: str) -> list[Tensor]:
        mine = torch.zeros(self._room, dtype=torch.uint8)
        mine[:_HEAD].view(torch.int64)[0] = size
        if raw:
            mine[_HEAD : _HEAD + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        everyone = torch.empty(self.world * self._room, dtype=torch.uint8)
        self._named(what, lambda: all_gather_into_tensor(everyone, mine, group=self.transport))
        return list(everyone.view(self.world, self._room).unbind())

    def move(self, offers: Sequence[Offer], read_here: Mapping[int, Sample], needs: Needs) -> Moved:
        """The batch of `offers` on this rank: the data that it computes with, outlines of the rest. One all-to-all.

        read_here: index in the batch -> the sample, for samples that this rank has read.
        Raises ValueError, on all ranks, if a rank would send or receive more than the limit.
        """
        sizes = np.array([offer.sizes(needs.parts) for offer in offers], np.int64).reshape(-1, len(needs.parts))
        transfers, items = needs.transfers([offer.reader for offer in offers], sizes, self.world)
        self._check(transfers, [offers[i].outline for i in items[:, 0]])
        out, into = transfers.sends(self.rank), transfers.receives(self.rank)
        gives, takes = transfers.send_splits(self.rank).tolist(), transfers.receive_splits(self.rank).tolist()
        packed = torch.zeros(sum(gives), dtype=torch.uint8)
        at = 0
        for sample, part, _ in items[out].tolist():
            at = _write(read_here[sample], needs.parts[part], packed, at)
        assert at == len(packed)
        arrived = torch.empty(sum(takes), dtype=torch.uint8)
        what = "exchange of the next step's items"
        # Runs even if nothing moves: all ranks must execute the same number of collectives.
        self._named(what, lambda: all_to_all_single(arrived, packed, takes, gives, group=self.transport))
        received: dict[int, dict[str, Tensor]] = {}  # index in the batch -> parts
        pieces = arrived.split(transfers.sizes[into].tolist())
        for piece, (sample, part, _) in zip(pieces, items[into].tolist(), strict=True):
            received.setdefault(sample, {})[needs.parts[part]] = piece
        needed = needs.of_rank(self.rank)
        samples = [
            _assembled(self.rank, offer, needed.get(i, set()), read_here.get(i), received.get(i, {}))
            for i, offer in enumerate(offers)
        ]
        return Moved(samples, sum(gives), sum(takes), transfers)

    def _check(self, transfers: AllToAllPlan, outlines: Sequence[SampleOutline]) -> None:
        """outlines: of the sample of each transfer."""
        for ranks, does in ((transfers.source, "send"), (transfers.destination, "receive")):
            total = np.bincount(ranks, transfers.sizes, self.world)
            if total.max(initial=0) > self.limit:
                rank = int(total.argmax())
                mine = np.flatnonzero(ranks == rank)
                largest = outlines[int(mine[transfers.sizes[mine].argmax()])].name
                raise ValueError(
                    f"rank {rank} would {does} {total[rank] / MIB:,.1f} MiB for the next step, the limit is "
                    f"{self.limit / MIB:,.1f} (largest sample: {largest}): raise data.exchange_mb, or lower "
                    "train.batch_size"
                )

    def _named(self, what: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except CommError as error:
            raise CommError(f"{what}: {error}", error.missing, error.reason) from error


def _write(sample: Sample, part: str, into: Tensor, at: int) -> int:
    """Writes a part of a sample into a buffer; returns its end."""
    if part == LANGUAGE_MODEL:
        size = 4 * len(sample)
        for ids in (sample.input_ids, sample.labels):
            into[at : at + size].view(torch.int32).copy_(ids)
            at += size
        return at
    for item in sample.media[part]:
        data = item.data
        assert data is not None
        into[at : at + data.nbytes].view(data.dtype).copy_(data.reshape(-1))
        at += -(-data.nbytes // ALIGNED) * ALIGNED
    return at


def _assembled(
    rank: int, offer: Offer, parts: set[str], own: Sample | None, received: Mapping[str, Tensor]
) -> Sample | SampleOutline:
    """A sample on a rank that computes with `parts` of it.

    own: if this rank has read it; received: the parts that another rank has read.
    """
    outline = offer.outline
    media: dict[str, list[Media]] = {}
    for name, items in outline.media.items():
        if name not in parts:
            media[name] = items
        elif own is not None:
            media[name] = own.media[name]
        else:
            media[name] = _items(offer, name, received[name])
    if LANGUAGE_MODEL not in parts:
        return replace(outline, media=media)
    if own is not None:
        ids, labels = own.input_ids, own.labels
    else:
        ids, labels = received[LANGUAGE_MODEL].view(torch.int32).to(torch.int64).split(outline.length)
        if digest_of(ids, labels) != outline.digest:
            raise CommError(
                f"rank {rank}: the tokens of {outline.name} differ from those that rank {offer.reader} has read: the "
                "transfer corrupted them"
            )
    return Sample(ids, labels, media, outline.name, outline.digest)


def _items(offer: Offer, name: str, arrived: Tensor) -> list[Media]:
    made, at = [], 0
    items = zip(offer.outline.media[name], offer.dtypes[name], offer.item_bytes(name), strict=True)
    for item, dtype, size in items:
        count = int(np.prod(item.shape)) * dtype.itemsize
        data = arrived[at : at + count].view(dtype).view(item.shape)
        made.append(Media(item.shape, item.tokens, data, about=item.about))
        at += size
    return made
