"""Byte-level tokenizer: every UTF-8 byte is a token, plus a few control tokens.

- No vocabulary file, no training, no download. Any text in any language round-trips.
- Cost in length: about 1 token per Latin letter, 2 per Cyrillic or Greek one, 3 per CJK character.
- Control tokens cannot be typed: ``encode`` yields bytes only, so a caption can never forge a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "<audio>", "<sep>", "<lang>")
TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] }}<eos>{% endgeneration %}
{%- elif message['content'] is string -%}<bos>{{ message['content'] }}<lang>en<sep>
{%- else -%}
<bos>
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}<{{ part['type'] }}>{%- endif -%}
{%- endfor -%}
<lang>en<sep>
{%- endif -%}
{%- endfor -%}
"""


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
        further = [name for name in encoders if name not in self.placeholders]
        first = 256 + len(SPECIALS)
        self.placeholders |= {name: first + i for i, name in enumerate(further)}
        self.vocab_size = -(-(first + len(further)) // 8) * 8
        known = [*SPECIALS, *(f"<{name}>" for name in further)]
        self.names = [*known, *(f"<unused{token}>" for token in range(256 + len(known), self.vocab_size))]
        """Names of the tokens from 256 on."""

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
                pieces.append(self.names[token - 256])
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


def write_byte_tokenizer(folder: Path, encoders: Iterable[str]) -> int:
    """Writes a HuggingFace tokenizer with the tokens of `ByteTokenizer(encoders)` and its prompt as chat template.

    Returns the number of its tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = ByteTokenizer(encoders)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokens = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(own.names)
    bos, eos, pad = SPECIALS[:3]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return own.vocab_size
