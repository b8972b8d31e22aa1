"""Byte-level tokenizer: every UTF-8 byte is a token, plus a few control tokens.

- No vocabulary file, no training, no download. Any text in any language round-trips.
- Cost in length: about 1 token per Latin letter, 2 per Cyrillic or Greek one, 3 per CJK character.
- Control tokens cannot be typed: ``encode`` yields bytes only, so a caption can never forge a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "<audio>", "<sep>", "<lang>")


class ByteTokenizer:
    """Ids 0..255 are bytes, followed by control tokens; ``vocab_size`` is padded to a multiple of 8.

    ``encoders``: names; each gets a placeholder. <image> is that of "vision", <audio> that of "audio". Other names get
    ids after the control tokens, in their order.

    ``prompt`` builds the model's input before its answer::

        <bos> [<image> * n | <audio> * m]... text <lang> fr <sep>

    and the answer is ``encode(caption) + [EOS]``. The language tag determines the language of the answer.
    """

    BOS, EOS, PAD, IMAGE, AUDIO, SEP, LANG = range(256, 256 + len(SPECIALS))
    vocab_size = -(-(256 + len(SPECIALS)) // 8) * 8

    def __init__(self, encoders: Iterable[str] = ()) -> None:
        self.placeholders: dict[str, int] = {"vision": self.IMAGE, "audio": self.AUDIO}
        self.further = [name for name in encoders if name not in self.placeholders]
        first = 256 + len(SPECIALS)
        self.placeholders |= {name: first + i for i, name in enumerate(self.further)}
        self.vocab_size = -(-(first + len(self.further)) // 8) * 8

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of ``text``. Lone surrogates (not valid in UTF-8) also survive the round trip."""
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``. Control tokens are dropped, or written as ``<name>`` with ``skip_special=False``.

        Invalid UTF-8 bytes (a model may generate some) become U+FFFD. Raises ValueError for an id outside
        the vocabulary.
        """
        pieces: list[str] = []
        run = bytearray()
        for token in ids:
            token = int(token)
            if 0 <= token < 256:
                run.append(token)
                continue
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary 0..{self.vocab_size - 1}")
            pieces.append(_utf8(run))
            run.clear()
            if not skip_special:
                names = [*SPECIALS, *(f"<{name}>" for name in self.further)]
                pieces.append(names[token - 256] if token - 256 < len(names) else f"<unused{token}>")
        pieces.append(_utf8(run))
        return "".join(pieces)

    def prompt(self, media: Sequence[tuple[str, int]], language: str, text: str = "") -> list[int]:
        """Ids up to and including ``<sep>``. ``media``: (modality, tokens) in order; each becomes that many
        copies of its placeholder. Raises ValueError for a modality without a placeholder."""
        ids = [self.BOS]
        for modality, tokens in media:
            if modality not in self.placeholders:
                raise ValueError(f"no placeholder token for modality {modality!r}; known: {sorted(self.placeholders)}")
            ids += [self.placeholders[modality]] * tokens
        return [*ids, *self.encode(text), self.LANG, *self.encode(language), self.SEP]


def _utf8(run: bytearray) -> str:
    try:
        return run.decode("utf-8", errors="surrogatepass")
    except UnicodeDecodeError:
        return run.decode("utf-8", errors="replace")
