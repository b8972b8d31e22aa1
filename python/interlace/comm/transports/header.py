"""Header of a batch from one process to another: its number, its operation, its sizes.

Peers report a rank that is in another part of its program, or has other arguments or shapes. Without a header they
would fill their tensors with wrong bytes. The header has a fixed size, so it can be received without knowing the batch.
Texts that are too long are truncated for display and compared by their digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.comm.process.agreement import BETWEEN_ARGUMENTS, Arguments
from interlace.comm.process.errors import CommError

_FORMAT = struct.Struct("<8sQ16s16s16sHHH")
_MAGIC, _ABORTED = b"ilcopies", b"ilrefuse"
HEADER_BYTES = 1024
_LABEL_BYTES = 200
_ARGUMENT_BYTES = 520
_SIZES_BYTES = HEADER_BYTES - _FORMAT.size - _LABEL_BYTES - _ARGUMENT_BYTES


class Header(NamedTuple):
    """Batch contents from one rank to another: number of elements and dtype of each tensor, in order."""

    sequence: int
    label: str
    arguments: str
    sizes: tuple[tuple[int, torch.dtype], ...]


def header_of(sequence: int, label: str, arguments: Arguments, tensors: Sequence[Tensor]) -> Header:
    return Header(sequence, label, arguments.text, tuple([(t.numel(), t.dtype) for t in tensors]))


def pack(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    label, label_prefix = _digested(header.label, _LABEL_BYTES)
    arguments, arguments_prefix = _digested(header.arguments, _ARGUMENT_BYTES)
    sizes, sizes_prefix = _digested(described(header.sizes), _SIZES_BYTES)
    head = _FORMAT.pack(
        _MAGIC, header.sequence, label, arguments, sizes, len(label_prefix), len(arguments_prefix), len(sizes_prefix)
    )
    return (head + label_prefix + arguments_prefix + sizes_prefix).ljust(HEADER_BYTES, b"\0")


@lru_cache(4096)  # the same headers repeat in every step
def headers_of(world: int, label: str, arguments: str, copies: tuple[tuple[int, int, torch.dtype], ...]) -> list[bytes]:
    """Packed header for each rank, for batch 0. copies: (rank, number of elements, dtype) of all ranks' tensors."""
    sizes = [tuple((count, dtype) for to, count, dtype in copies if to == rank) for rank in range(world)]
    return [pack(Header(0, label, arguments, each)) for each in sizes]


def pack_abort(reason: str) -> bytes:
    """HEADER_BYTES bytes that announce an abort, with the reason."""
    shown = reason.encode()[: HEADER_BYTES - _FORMAT.size]
    return (_FORMAT.pack(_ABORTED, 0, b"", b"", b"", len(shown), 0, 0) + shown).ljust(HEADER_BYTES, b"\0")


def check_packed(rank: int, peer: int, expected: Header, raw: bytes) -> None:
    """Raises CommError unless `raw`, from `peer`, announces the batch that `rank` expects.

    rank, peer: global numbers.
    """
    if raw == pack(expected):
        return
    magic, sequence, label, arguments, sizes, *lengths = _FORMAT.unpack_from(raw)
    texts, start = [], _FORMAT.size
    for length in lengths:
        texts.append(raw[start : start + length].decode(errors="replace"))
        start += length
    if magic == _ABORTED:
        raise CommError(f"rank {rank}, {expected.label}: rank {peer} aborted ({texts[0]})", [peer], "it aborted")
    if magic != _MAGIC:
        raise CommError(
            f"rank {rank}, {expected.label}: rank {peer} sent something else than a header: its program differs"
        )
    if (sequence, label) != (expected.sequence, _digested(expected.label, 0)[0]):
        raise CommError(
            f"rank {rank} is in {expected.label} (batch {expected.sequence}), but rank {peer} is in {texts[0]} (batch "
            f"{sequence}): the ranks' programs differ"
        )
    if arguments != _digested(expected.arguments, 0)[0]:
        cut = lengths[1] == _ARGUMENT_BYTES
        different = "; ".join(differences(expected.arguments, texts[1], "here", f"on rank {peer}", cut))
        different = different or f"arguments of rank {peer} differ after the part that fits in a header"
        raise CommError(f"rank {rank}, {expected.label}: {different}: every rank must pass the same")
    if sizes != _digested(described(expected.sizes), 0)[0]:
        raise CommError(
            f"rank {rank}, {expected.label}: rank {peer} sends {texts[2]}, {described(expected.sizes)} expected: the "
            "ranks pass tensors of different shapes or dtypes"
        )
    raise CommError(f"rank {rank}, {expected.label}: the header that rank {peer} sent is damaged")


@lru_cache(4096)  # the same headers repeat in every step
def described(sizes: Sequence[tuple[int, torch.dtype]]) -> str:
    return " + ".join(f"{count} {str(dtype).removeprefix('torch.')}" for count, dtype in sizes) or "nothing"


def differences(own_text: str, peer_text: str, own_place: str, peer_place: str, cut: bool = False) -> list[str]:
    """The arguments that differ between two texts, with both values. cut: the end of the second text is missing."""
    own, peers = _named(own_text), _named(peer_text)
    if cut and peers:  # the last one may be truncated
        peers.popitem()
    names = [name for name in (*own, *(peers.keys() - own.keys())) if name in peers or not cut]
    return [
        f"{name} is {own.get(name, 'not given')} {own_place} but {peers.get(name, 'not given')} {peer_place}"
        for name in names
        if own.get(name) != peers.get(name)
    ]


def _named(arguments: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in arguments.split(BETWEEN_ARGUMENTS) if pair)
    return {name: value for name, _, value in pairs}


@lru_cache(4096)
def _digested(text: str, shown_bytes: int) -> tuple[bytes, bytes]:
    """The digest of a text, and its displayed prefix."""
    raw = text.encode()
    return hashlib.blake2b(raw, digest_size=16).digest(), raw[:shown_bytes]
