"""HTML page of samples as the model sees them: tokens coloured by type, targets marked, pictures beside the text."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from interlace.data.chats.encoding.tokens import NO_END, ChatFormat, Encoded
from interlace.data.chats.examine import Examined
from interlace.data.chats.files.shapes import Chat
from interlace.modalities import named
from interlace.modalities.errors import BROKEN, DecodeError
from interlace.simulate.pictures.page import page, table

MOST_TOKENS = 1500  # per sample on the page
MOST_KEYS = 12  # per line
BARS = 10
_KEY = (
    '<p>Each shade is a token: <span class="t learnt">learnt</span>, <span class="t special">special</span>, '
    "<span class=item>a media item x its tokens</span>; the rest is read only.</p>"
)


@dataclass
class Named:
    """Number of records per name, and the first record of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, names: Iterable[str], where: str) -> None:
        for name in names:
            self.counts[name] += 1
            self.first.setdefault(name, where)

    def words(self, most: int | None = None) -> str:
        """The most common names, at most `most`."""
        named = ", ".join(f"{name} ({count:,})" for name, count in self.counts.most_common(most))
        more = 0 if most is None else len(self.counts) - most
        return f"{named} and {more} more" if more > 0 else named


@dataclass
class Findings:
    """Results of a check, counted record by record. strict: True if samples that are too long are an error in the run;
    chats: the model's chat format, if known. ignored: keys that are not used; typed: special tokens that occur
    as text; ended: True if any answer ends with a special token."""

    strict: bool = False
    chats: ChatFormat | None = None
    usable: int = 0
    cut: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    targets: int = 0
    media: Counter[str] = field(default_factory=Counter)
    ignored: Named = field(default_factory=Named)
    typed: Named = field(default_factory=Named)
    ended: bool = False

    def add(self, one: Examined) -> None:
        """Counts a record."""
        if one.chat is not None:
            self.ignored.add(one.chat.ignored, one.raw.where)
        if one.broken is not None:
            self.left_out.append((one.raw.where, one.broken.kind, " ".join(str(one.broken).split())))
            return
        self.usable += 1
        if one.was_cut:
            self.cut.append(one.raw.where)
        if one.chat is not None:
            self.media.update(part.kind for part in one.chat.media)
        if one.encoded is not None:
            self.lengths.append(len(one.encoded.ids))
            self.targets += sum(one.encoded.targets)
        if self.chats is not None and one.encoded is not None and one.chat is not None:
            self.typed.add(self.chats.typed(one.chat), one.raw.where)
            self.ended = self.ended or self.chats.ends_answer(one.encoded)

    @property
    def broken(self) -> list[tuple[str, str, str]]:
        """Records left out by error: for any reason except length, or for length too if `strict`."""
        return [entry for entry in self.left_out if self.strict or entry[1] != "too long"]

    def lines(self) -> list[str]:
        """The report as lines of text."""
        total = self.usable + len(self.left_out)
        lines = [f"{total:,} records, {self.usable:,} usable, {len(self.cut):,} cut, {len(self.left_out):,} left out"]
        if self.media:
            lines.append("media: " + ", ".join(f"{count:,} of kind {kind}" for kind, count in self.media.most_common()))
        if self.lengths:
            lengths = np.array(self.lengths)
            tokens = int(lengths.sum())
            lines.append(
                f"tokens: {tokens:,} in all, {self.targets:,} of them ({100 * self.targets / tokens:.0f} %) learnt; "
                f"a sample has {lengths.min():,} to {lengths.max():,}, half of them at most {int(np.median(lengths)):,}"
            )
            lines += histogram(lengths)
        for each, what in ((self.ignored, "keys that are ignored"), (self.typed, "special tokens written as words")):
            if each.counts:
                where = next(iter(each.first.values()))
                lines.append(f"{what} (records): {each.words(MOST_KEYS)}, e.g. {where}")
        if self.chats is not None and self.lengths and not self.ended:
            lines.append(f"warning: {NO_END.format(self.chats.tokenizer.eos_token)}")
        kinds = Counter(kind for _, kind, _ in self.left_out)
        for kind, count in kinds.most_common():
            where, _, reason = next(entry for entry in self.left_out if entry[1] == kind)
            lines.append(f"{count:,} x {kind} ({BROKEN[kind]}), e.g. {where}: {reason}")
        return lines

    def listing(self) -> list[str]:
        """One line for each record left out or cut, each ignored key and each special token written as text."""
        lines = [f"{where}: {kind}: {reason}" for where, kind, reason in self.left_out]
        lines += [f"{where}: cut" for where in self.cut]
        for each, what in ((self.ignored, "key that is ignored"), (self.typed, "special token written as words")):
            for name, count in each.counts.most_common():
                lines.append(f"{each.first[name]}: {what}: {name} (records: {count:,})")
        return lines


def histogram(lengths: np.ndarray, width: int = 40) -> list[str]:
    """A histogram of token counts, as lines of text."""
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, BARS + 1).astype(int))
    counts, _ = np.histogram(lengths, edges)
    most = max(int(counts.max()), 1)
    return [
        f"  {low:>7,} - {high - 1:>7,} {'#' * -(-int(count) * width // most):<{width}} {int(count):,}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def write(
    title: str, findings: Findings, shown: Iterable[tuple[str, Chat, Encoded | None]], chats: ChatFormat | None
) -> str:
    """The page, self-contained. shown: (where, chat, its tokens if known) of each sample on it."""
    samples = "\n".join(_sample(where, chat, encoded, chats) for where, chat, encoded in shown)
    left_out = f"<h2>Left out</h2>{table(findings.left_out, kind='left-out')}" if findings.left_out else ""
    report = html.escape("\n".join(findings.lines()))
    return page(title, f"{_KEY}<pre>{report}</pre>\n{samples}\n{left_out}")


def _sample(where: str, chat: Chat, encoded: Encoded | None, chats: ChatFormat | None) -> str:
    pictures = "".join(f"<figure>{_thumbnail(p.kind, p.path)}</figure>" for p in chat.media)
    if encoded is None or chats is None:
        text = "".join(
            f"<p><b>{turn.role}</b> "
            + "".join(html.escape(p.text) if p.kind == "text" else f"<i>[{p.kind}]</i>" for p in turn.parts)
            + "</p>"
            for turn in chat.turns
        )
        return f"<section><h3>{html.escape(where)}</h3><div class=media>{pictures}</div>{text}</section>"
    learnt = sum(encoded.targets)
    head = f"{where}: {len(encoded.ids):,} tokens, {learnt:,} learnt, {len(encoded.items)} media items"
    text = "".join(_pieces(encoded, chats))
    return f"<section><h3>{html.escape(head)}</h3><div class=media>{pictures}</div><p class=text>{text}</p></section>"


def _pieces(encoded: Encoded, chats: ChatFormat) -> Iterable[str]:
    """The tokens as spans; a media item is one span."""
    starts = {item.start: item for item in encoded.items}
    special = chats.added
    place = 0
    while place < min(len(encoded.ids), MOST_TOKENS):
        item = starts.get(place)
        if item is not None:
            shape = " x ".join(map(str, item.shape))
            details = "".join(f", {key} {values}" for key, values in item.about.items())
            yield f'<span class=item title="{html.escape(shape + details)}">{item.encoder} x {item.tokens}</span>'
            place += item.tokens
            continue
        end = place + 1
        # One character may span several tokens. They are decoded together: alone they would show as replacement
        # characters.
        while end < len(encoded.ids) and end - place < 8 and end not in starts:
            if not chats.decode(encoded.ids[place:end], skip_special=False).endswith("\ufffd"):
                break
            end += 1
        marks = ["t", *["learnt"][: encoded.targets[place]], *["special"][: encoded.ids[place] in special]]
        text = chats.decode(encoded.ids[place:end], skip_special=False)
        text = html.escape(text).replace("\n", "&#9166;\n")
        yield f'<span class="{" ".join(marks)}">{text}</span>'
        place = end
    if len(encoded.ids) > MOST_TOKENS:
        yield f"<em> ... {len(encoded.ids) - MOST_TOKENS:,} tokens more</em>"


def _thumbnail(kind: str, path: str) -> str:
    name = html.escape(path.rpartition("/")[2])
    try:
        return named(kind).preview(path, name)
    except DecodeError as error:  # only the header was checked before
        return f"<figcaption>{name}: {html.escape(' '.join(str(error).split()))}</figcaption>"
