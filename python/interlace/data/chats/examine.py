"""Examination of records: each one's chat, sizes and tokens, or the reason why it is left out.

Records are processed in blocks: threads inspect the files of a block, and its texts are tokenised together. For large
data, processes build an index (`files/index.py`) first; files in the index are not inspected again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from interlace._cores import usable_cores
from interlace.data.chats.encoding.tokens import ChatFormat, Encoded
from interlace.data.chats.files import index as chats_index
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.index import Known
from interlace.data.chats.files.records import ChatFileError, Raw
from interlace.data.chats.files.shapes import Chat, Part
from interlace.data.chats.files.sources import Rules, Stamp, chat_of, stamp
from interlace.modalities import named
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.files import container_of

BLOCK = 256  # records per block; several threads inspect its files


@dataclass(frozen=True)
class Examined:
    """Result for one record: its chat and tokens, or why it is left out.

    length: before it was cut. media: path -> state of its files at the time of inspection (`stamp`).
    """

    raw: Raw
    chat: Chat | None = None
    encoded: Encoded | None = None
    broken: BrokenSampleError | None = None
    length: int = 0
    media: Mapping[str, Stamp] = field(default_factory=dict)

    @property
    def was_cut(self) -> bool:
        return self.encoded is not None and len(self.encoded.ids) < self.length


def examine(files: Sequence[Path], chats: ChatFormat | None, rules: Rules, media: Path) -> Iterator[Examined]:
    """The result for each record of `files`; without `chats`, records are not tokenised.

    `media`: see `records.records`; the index of large data is stored beside it. Raises ChatFileError, and
    ImportError with the package to install.
    """
    index = chats_index.of_large(files, rules, media)
    if index is not None:
        yield from _examine_blocks(index.blocks(BLOCK), chats, rules)
        return
    for path in files:
        yield from examine_records(chats_files.records(path, media, rules.prompt), chats, rules)


def examine_records(records: Iterator[Raw], chats: ChatFormat | None, rules: Rules) -> Iterator[Examined]:
    """Like `examine`, for records."""
    blocks = iter(lambda: list(islice(records, BLOCK)), [])
    yield from _examine_blocks(((block, [[]] * len(block)) for block in blocks), chats, rules)


def _examine_blocks(
    blocks: Iterable[tuple[list[Raw], list[list[Known]]]], chats: ChatFormat | None, rules: Rules
) -> Iterator[Examined]:
    with ThreadPoolExecutor(max(2, usable_cores()), "interlace-look") as pool:
        for raws, known in blocks:
            yield from _examine_block(raws, chats, rules, pool, known)


def _examine_block(
    block: list[Raw],
    chats: ChatFormat | None,
    rules: Rules,
    pool: ThreadPoolExecutor,
    known: list[list[Known]],
) -> Iterator[Examined]:
    read: list[Chat | BrokenSampleError] = []
    for raw in block:
        try:
            read.append(chat_of(raw, rules))
        except BrokenSampleError as error:
            read.append(error)

    def refused(kind: str) -> BrokenSampleError | None:
        try:
            if chats is not None:
                chats.encoders_of(kind)
        except BrokenSampleError as error:
            return error
        return None

    def takes_probe(kind: str) -> bool:
        return chats is None or chats.takes_probe(kind)

    def trusted(part: Part) -> bool:
        """True if the size in the record is used: the file is not inspected."""
        return rules.sizes == "records" and bool(part.stated) and takes_probe(part.kind)

    files: dict[tuple[str, str], Known | None] = {}
    for chat, known_media in zip(read, known, strict=True):
        media = chat.media if isinstance(chat, Chat) else []
        for place, part in enumerate(media):
            before = known_media[place] if len(known_media) == len(media) else None
            if not trusted(part):
                files.setdefault((part.kind, part.path), before)

    def look(file: tuple[str, str]) -> tuple[Stamp, Any]:
        kind, path = file
        was = stamp(path)  # taken before the read, so that a change during the read is detected
        if (error := refused(kind)) is not None:
            return was, error
        before = files[file]
        if before is not None and before[1] and before[0] == was and takes_probe(kind):
            return was, before[1]
        try:
            probe = named(kind).probe if chats is None else partial(chats.look, kind)
            return was, probe(path, decode=rules.decode)
        except BrokenSampleError as error:
            return was, error

    looked = dict(zip(files, pool.map(look, files), strict=True))
    made: list[Examined] = []
    ready: list[tuple[Chat, list[Any]]] = []
    places: list[int] = []  # indices in the block, parallel to `ready`
    for place, (raw, chat) in enumerate(zip(block, read, strict=True)):
        if isinstance(chat, BrokenSampleError):
            made.append(Examined(raw, broken=chat))
            continue
        sizes: list[Any] = []
        stamps: dict[str, Stamp] = {}
        for part in chat.media:
            if trusted(part):
                sizes.append(refused(part.kind) or part.stated)
            else:
                stamps[container_of(part.path)], size = looked[part.kind, part.path]
                sizes.append(size)
        bad = next((size for size in sizes if isinstance(size, BrokenSampleError)), None)
        made.append(Examined(raw, chat, broken=bad, media=stamps))
        if bad is None and chats is not None:
            ready.append((chat, sizes))
            places.append(place)
    encoded = chats.encode_many(ready) if chats is not None and ready else []
    results = dict(zip(places, encoded, strict=True))
    for place, one in enumerate(made):
        result = results.get(place)
        if isinstance(result, BrokenSampleError):
            yield replace(one, broken=result)
        elif isinstance(result, ValueError):  # of the processor or template: affects all records
            raise ChatFileError(f"{one.raw.where}: {result}") from None
        elif result is not None:
            assert one.chat is not None
            yield replace(_fitted(one.raw, one.chat, result, rules), media=one.media)
        else:
            yield one


def _fitted(raw: Raw, chat: Chat, encoded: Encoded, rules: Rules) -> Examined:
    """Applies the limit on the length of a record."""
    length, most = len(encoded.ids), rules.max_tokens
    if most is None or length <= most:
        return Examined(raw, chat, encoded, length=length)
    if rules.on_too_long == "cut":
        shorter = shortened(encoded, most)
        if shorter is not None:
            return Examined(raw, chat, shorter, length=length)
        why = f"has {length} tokens, and none to learn among the first {most}"
    else:
        why = f"has {length} tokens, more than data.max_tokens = {most}"
    return Examined(raw, chat, encoded, BrokenSampleError("too long", why), length)


def shortened(encoded: Encoded, most: int) -> Encoded | None:
    """The beginning of a sample: at most `most` tokens, media items whole or dropped, the last token a target.

    Tokens after the last target have no effect. None when no target is left.
    """
    end = most
    for item in encoded.items:
        if item.start + item.tokens > end:  # all items of one picture are dropped together
            first = next(one for one in encoded.items if one.medium == item.medium)
            end = min(end, first.before)
            break
    learnt = [place for place in range(min(end, len(encoded.ids))) if encoded.targets[place]]
    # The first token is never predicted.
    if not learnt or learnt[-1] == 0:
        return None
    end = learnt[-1] + 1
    items = [item for item in encoded.items if item.start < end]
    return Encoded(encoded.ids[:end], encoded.targets[:end], items)
