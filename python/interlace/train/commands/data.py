"""``interlace data check``: examines the files of a config, or files alone, before training.

``interlace data index``: record offsets and sizes, computed once for large data.

``interlace data folder``: makes chats from a folder of pictures.
"""

from __future__ import annotations

import argparse
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from interlace._files import write_whole
from interlace.data.reading import Reading
from interlace.train.blame import UNREADABLE, check_at_least, writing
from interlace.train.config.load import ConfigError, blaming, load

if TYPE_CHECKING:
    from interlace.data.chats.encoding.tokens import ChatFormat
    from interlace.data.chats.files.sources import Rules
    from interlace.train.config.data import Data
    from interlace.train.config.sections import Config

CLEAN, BROKEN = 0, 1
MOST_NAMED = 20
HELD_OUT = ".held-out"


def check(options: argparse.Namespace) -> int:
    """Reports on the data and writes a page of samples; 0 if all is well, 1 if records or files are broken."""
    from interlace.data.chats import page as chats_page
    from interlace.data.chats.dataset import SEEN

    if options.samples < 0:
        raise ConfigError(f"--samples {options.samples}: 0 or more")
    splits, chats, config = _splits(options)
    if options.samples:
        _check_out(options.out, [*options.files, *(file for split in splits for file in split.files)])
    strict = splits[0].rules.on_too_long == "error"
    findings = chats_page.Findings(strict, chats)
    shown: list[Any] = []
    trained: dict[str, set[int]] = defaultdict(set)
    tokens: dict[str, np.ndarray] = {}
    hashes: dict[str, list[int]] = defaultdict(list)  # of the records counted in `tokens`
    overlaps = False
    for place, split in enumerate(splits):
        own = chats_page.Findings(strict, chats)
        seen = 0
        room = len(shown) + -(-(options.samples - len(shown)) // (len(splits) - place))  # some samples of each split
        for one in _examined(split.files, chats, split.rules, None if config is None else config.data.cache):
            own.add(one)
            findings.add(one)
            line = zlib.crc32(one.raw.line)
            if split.kind == "train":
                trained[split.source].add(line)
                hashes[split.source] += [line] * (one.broken is None)
            elif one.broken is None:
                seen += line in trained[split.source]
            if one.broken is None and one.chat is not None and len(shown) < room:
                shown.append((one.raw.where, one.chat, one.encoded))
        if split.kind == "train":
            tokens[split.source] = np.array(own.lengths, np.int64)
        listed = own.listing() if options.list else []
        print("\n".join([split.name + ", ".join(map(str, split.files)), *own.lines(), *listed]))
        if 100 * seen > own.usable:  # a few matches may be collisions of the 32-bit hash
            overlaps = True
            print(SEEN.format(seen, own.usable))
    if config is not None and len(config.data.sources) > 1:
        print("\n".join(_mixture(config.data, tokens)))
    if options.samples:
        title = f"interlace data check {' '.join(map(str, options.files))}"
        with writing("--out", options.out):
            write_whole(options.out, chats_page.write(title, findings, shown, chats))
        print(f"{options.out}: {len(shown)} samples as the model will see them")
    if config is not None and config.data.reading == "random":
        for note in _batches(config, tokens, hashes):
            print(note)
    return BROKEN if findings.broken or overlaps or not findings.usable else CLEAN


@dataclass(frozen=True)
class _Split:
    """Files checked together. kind: "train", "validation" or, for files alone, ""; source: name of the source."""

    source: str
    kind: str
    files: list[Path]
    rules: Rules

    @property
    def name(self) -> str:
        words = " ".join(word for word in (self.source, self.kind) if word)
        return f"{words}: " if words else ""


def _mixture(data: Data, tokens: Mapping[str, np.ndarray]) -> list[str]:
    """Lines of text: draws of an epoch from each source, before the validation split."""
    from interlace.data.mixture import share_of

    sources = [(each.name, each.weight, lengths) for each in data.sources if len(lengths := tokens[each.name])]
    limits = {each.name: each.limit for each in data.sources}
    sizes = {name: min(len(lengths), limits[name] or len(lengths)) for name, _, lengths in sources}
    means = [Fraction(int(lengths.sum()), len(lengths)) for _, _, lengths in sources]
    if not sources:
        return []
    shares = share_of([weight for _, weight, _ in sources], means if data.mix_by == "tokens" else None)
    draws = sum(sizes.values())
    read = [share * mean for share, mean in zip(shares, means, strict=True)]
    lines = [f"an epoch draws {draws:,} samples (weights are shares of {data.mix_by}):"]
    for (name, _, _), share, part in zip(sources, shares, read, strict=True):
        lines.append(
            f"  {name}: {100 * float(share):.1f} % of the samples, {100 * float(part / sum(read)):.1f} % of the "
            f"tokens; gone through {float(share * draws / sizes[name]):.2f} times"
        )
    return lines


def _batches(config: Config, tokens: Mapping[str, np.ndarray], hashes: Mapping[str, list[int]]) -> list[str]:
    """Lines of text: notes of a run on its batches from records with these lengths and hashes."""
    from interlace.data import MixedDataset, Part, ReadAhead
    from interlace.data.chats.dataset import train_picks
    from interlace.train.data.feed import batch_notes, loader

    data, parts = config.data, list[Part]()
    for each in data.each_source():
        name = each.name if data.sources else ""
        own = np.array(hashes.get(name, []), np.uint32)
        picks = train_picks(own, 0.0 if each.validation else data.held_out, each.limit)
        if not len(picks):
            return []
        parts.append(Part(each.name, cast(Any, _Lengths(tokens[name][picks])), each.weight))
    dataset = MixedDataset(parts, data.mix_by) if len(parts) > 1 else parts[0].data
    size, seed = config.train.batch_size, config.run.seed
    return batch_notes(
        loader(dataset, size, data.row_tokens, seed=seed, drop_last=data.drop_last, ahead=ReadAhead(prefetch=0))
    )


class _Lengths(Reading):
    """A dataset with known sample lengths only."""

    def __init__(self, token_lengths: np.ndarray) -> None:
        super().__init__()
        self.token_lengths = token_lengths

    def __len__(self) -> int:
        return len(self.token_lengths)


def index(options: argparse.Namespace) -> int:
    """Indexes the files of a config, or files alone; 0 if all records can be used, 1 if some are broken."""
    from interlace.data import cache_folder
    from interlace.data.chats.files import index as chats_index
    from interlace.data.chats.files import records as chats_files
    from interlace.data.chats.files.sources import Rules
    from interlace.modalities import names

    path = _config_among(options)
    check_at_least(1, options, "processes")
    groups: list[tuple[str, list[Any], Rules]] = []
    if path is not None:
        data = load(path, options.set).data
        if data.own:
            raise ConfigError(f"{path}: data.dataset is {data.dataset!r}; only files of chats are indexed")
        cache = data.cache
        for each in data.each_source():
            rules = Rules(each.media, decode=data.decode_first, sizes=data.sizes, prompt=each.prompt)
            groups += [(each.name, list(files), rules) for files in (each.train, each.validation) if files]
    else:
        cache = options.cache
        groups = [("", options.files, Rules(options.media, decode=options.decode, sizes=options.sizes))]
    media = cache_folder(cache) / "chats" / "media"
    broken = 0
    for name, files, rules in groups:
        with blaming("", UNREADABLE):
            made = chats_index.load(chats_files.find(files), rules, media, processes=options.processes, say=print)
        kinds = ", ".join(f"{made.totals[kind]:,} of kind {kind}" for kind in names() if made.totals.get(kind))
        print(
            f"{name}{': ' * bool(name)}{len(made):,} records, {made.totals['broken']:,} of them broken, "
            f"{made.totals['text']:,} characters; media: {kinds or 'none'}; {made.folder}"
        )
        for where, kind, why in islice(made.broken(), MOST_NAMED):
            print(f"{where}: {kind}: {' '.join(why.split())}")
        broken += made.totals["broken"]
    return BROKEN if broken else CLEAN


def folder(options: argparse.Namespace) -> int:
    """Writes JSON lines of chats about a folder's pictures; 0 if all of them are included, 1 if some are left out."""
    from interlace.data.chats.files import picture_folder as chats_folder
    from interlace.data.chats.files.shapes import tags

    share, question = options.held_out, options.question
    if not 0 <= share < 1:
        raise ConfigError(f"--held-out {share:g}: a share of the pictures, from 0 to less than 1, such as 0.2")
    if question is not None and (tags().search(question) or not question.strip()):
        raise ConfigError(f"--question {question!r}: give its words alone, the picture is put before them")
    if options.out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--out {options.out}: give the name of a .jsonl file")
    outs = [options.out, options.out.with_name(f"{options.out.stem}{HELD_OUT}{options.out.suffix}")][: 1 + (share > 0)]
    for out in outs:
        if out.exists():
            raise ConfigError(f"--out: {out} is there already: remove it, or give another name")
        if not out.parent.is_dir():  # checked before every picture is read
            raise ConfigError(f"--out {out}: cannot write there: no folder {out.parent}")
    with blaming("", UNREADABLE):
        result = chats_folder.look_through(options.folder)
    for path, why in result.left_out[:MOST_NAMED]:
        print(f"{path}: {why}")
    if len(result.left_out) > MOST_NAMED:
        print(f"and {len(result.left_out) - MOST_NAMED:,} more")
    if not result.pictures:
        raise ConfigError(f"{options.folder}: none of its {len(result.left_out):,} pictures can be used")
    kept = chats_folder.held_out(result.pictures, share, by_answer=not result.captions)
    if share > 0 and (all(kept) or not any(kept)):
        raise ConfigError(f"--held-out {share:g}: of {len(kept)} pictures that leaves none on one side")
    asked = question or ("Describe the picture." if result.captions else "What is it?")
    sides = [[one for one, held in zip(result.pictures, kept) if held is side] for side in (False, True)]
    try:
        for out, mine in zip(outs, sides):
            with writing("--out", out):
                write_whole(out, chats_folder.lines(mine, asked, out.parent.absolute()))
    except ConfigError:
        for out in outs:  # all of them or none
            out.unlink(missing_ok=True)
        raise
    for out, mine in zip(outs, sides):
        print(f"{out}: {len(mine):,} pictures")
    answers = len({one.answer for one in result.pictures})
    what = "texts beside them are" if result.captions else "names of their sub-folders are"
    print(f"the {what} the answers, {answers:,} different ones; {len(result.left_out):,} pictures left out")
    if result.others:
        print(f"{result.others:,} other files are no pictures and were passed over")
    return BROKEN if result.left_out else CLEAN


def _splits(options: argparse.Namespace) -> tuple[list[_Split], ChatFormat | None, Config | None]:
    """The files to check; for those of a config also the chat format of its model, and the config. Raises
    ConfigError."""
    from dataclasses import replace

    from interlace.data.chats.files.sources import Rules
    from interlace.train.data.feed import chat_format, chat_sources
    from interlace.train.data.texts import ModelTokenizer, tokenizer_of
    from interlace.train.models.build import build
    from interlace.train.models.media_specs import check_inputs

    path, decode = _config_among(options), not options.headers
    if path is None:
        return [_Split("", "", options.files, Rules(decode=decode))], None, None
    config = load(path, options.set)
    if config.data.own:
        raise ConfigError(f"{path}: data.dataset is {config.data.dataset!r}; only files of chats are checked")
    tokenizer = tokenizer_of(config, source=str(path))
    assert isinstance(tokenizer, ModelTokenizer)  # of chats
    model = build(config, tokenizer, source=str(path))
    check_inputs(config, model, source=str(path))
    splits = []
    for each, rules in chat_sources(config, model, str(path)):
        name = each.name if config.data.sources else ""
        for kind, files in (("train", each.train), ("validation", each.validation)):
            if files:
                splits.append(_Split(name, kind, [Path(file) for file in files], replace(rules, decode=decode)))
    return splits, chat_format(config, model, tokenizer, str(path)), config


def _check_out(out: Path, inputs: list[Path]) -> None:
    """Raises ConfigError if the page would overwrite a config or data, or lie in a data folder."""
    place = out.expanduser().resolve()
    for path in inputs:
        there = path.expanduser().resolve()
        if place == there or (there.is_dir() and there in place.parents):
            raise ConfigError(f"--out {out}: is (in) {path}, which is read; give another name for the page")


def _examined(files: list[Path], chats: ChatFormat | None, rules: Rules, cache: str | None) -> Iterator[Any]:
    from interlace.data import cache_folder
    from interlace.data.chats import examine as chats_examine
    from interlace.data.chats.files import records as chats_files

    media = cache_folder(cache) / "chats" / "media"
    with blaming("", UNREADABLE):
        yield from chats_examine.examine(chats_files.find(files), chats, rules, media)


def _config_among(options: argparse.Namespace) -> Path | None:
    """The one config among the files of a command; None for files of chats. Raises ConfigError."""
    configs = [path for path in options.files if path.suffix == ".toml"]
    if configs and len(options.files) > 1:
        raise ConfigError(f"{configs[0]}: give one config, or files of chats")
    if options.set and not configs:
        raise ConfigError("--set changes a config, and none is given")
    return configs[0] if configs else None
