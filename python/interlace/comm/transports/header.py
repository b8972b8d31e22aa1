"""What precedes the bytes of a batch from one process to another: which batch it is, and what comes.

A rank that is elsewhere in its program, or passes other shapes, is reported by its peers in words instead of filling
their tensors with bytes of something else. Fixed size, so that it can be received without knowing what will come; texts
that are too long are cut for display and compared by their digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from interlace.comm.transports.base import CommError

_FORMAT = struct.Struct("<8sQ16s16sHH")
_MAGIC, _REFUSED = b"ilcopies", b"ilrefuse"
HEADER_BYTES = 512
_LABEL_BYTES = 200
_SIZES_BYTES = HEADER_BYTES - _FORMAT.size - _LABEL_BYTES


class Manifest(NamedTuple):
    """What one rank sends to another within one batch: number of elements and dtype of each tensor, in order."""

    sequence: int
    label: str
    sizes: list[tuple[int, str]]


def manifest(sequence: int, label: str, tensors: Sequence[Tensor]) -> Manifest:
    return Manifest(sequence, label, [(t.numel(), str(t.dtype).removeprefix("torch.")) for t in tensors])


def pack(found: Manifest) -> bytes:
    """HEADER_BYTES bytes."""
    label, sizes = found.label.encode(), described(found.sizes).encode()
    shown = label[:_LABEL_BYTES], sizes[:_SIZES_BYTES]
    head = _FORMAT.pack(_MAGIC, found.sequence, _digest(label), _digest(sizes), len(shown[0]), len(shown[1]))
    return (head + shown[0] + shown[1]).ljust(HEADER_BYTES, b"\0")


def pack_refusal(reason: str) -> bytes:
    """HEADER_BYTES bytes that say: nothing will come, and why."""
    shown = reason.encode()[: HEADER_BYTES - _FORMAT.size]
    return (_FORMAT.pack(_REFUSED, 0, b"", b"", len(shown), 0) + shown).ljust(HEADER_BYTES, b"\0")


def check_packed(rank: int, peer: int, expected: Manifest, raw: bytes) -> None:
    """Raises CommError unless `raw`, from `peer`, announces what `rank` expects."""
    magic, sequence, label_digest, sizes_digest, label_length, sizes_length = _FORMAT.unpack_from(raw)
    texts = raw[_FORMAT.size :]
    first = texts[:label_length].decode(errors="replace")
    if magic == _REFUSED:
        raise CommError(f"rank {rank}, {expected.label}: rank {peer} gave up ({first})")
    if magic != _MAGIC:
        raise CommError(f"rank {rank}, {expected.label}: what rank {peer} sent is no header: its program differs")
    if (sequence, label_digest) != (expected.sequence, _digest(expected.label.encode())):
        raise _elsewhere(rank, peer, expected, sequence, first)
    if sizes_digest != _digest(described(expected.sizes).encode()):
        second = texts[label_length : label_length + sizes_length].decode(errors="replace")
        raise _other_sizes(rank, peer, expected, second)


def check(rank: int, peer: int, expected: Manifest, found: Manifest) -> None:
    """Raises CommError unless `found`, from `peer`, is what `rank` expects."""
    if (found.sequence, found.label) != (expected.sequence, expected.label):
        raise _elsewhere(rank, peer, expected, found.sequence, found.label)
    if found.sizes != expected.sizes:
        raise _other_sizes(rank, peer, expected, described(found.sizes))


def described(sizes: Sequence[tuple[int, str]]) -> str:
    return " + ".join(f"{count} {dtype}" for count, dtype in sizes) or "nothing"


def _elsewhere(rank: int, peer: int, expected: Manifest, sequence: int, label: str) -> CommError:
    return CommError(
        f"rank {rank} is in {expected.label} (batch {expected.sequence}), but rank {peer} is in {label} (batch "
        f"{sequence}): the ranks' programs differ"
    )


def _other_sizes(rank: int, peer: int, expected: Manifest, sizes: str) -> CommError:
    return CommError(
        f"rank {rank}, {expected.label}: rank {peer} sends {sizes}, {described(expected.sizes)} expected: the ranks "
        "pass tensors of different shapes or dtypes"
    )


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
