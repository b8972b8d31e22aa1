"""Errors of media, and of the samples that they belong to."""

from __future__ import annotations

BROKEN = {
    "encoding": "the line is no text in UTF-8, or names halves of characters",
    "json": "the line is no JSON",
    "tar": "members of a tar that make no sample, or the end of a tar that was cut short",
    "record": "the record is no object with messages or conversations",
    "turns": "the list of turns is missing, empty or of other things than turns",
    "role": "a role that is not known",
    "order": "roles in an order that no chat has",
    "content": "content that is neither text nor a list of typed items",
    "type": "an item of an unknown type, or a medium in an answer",
    "empty": "a turn that says nothing",
    "key": "a key that changes the meaning and is not supported",
    "weight": "a weight that is neither 0 nor 1, or weights that contradict each other",
    "targets": "no turn that the model could learn from",
    "media count": "tags and files that differ in number",
    "media key": "a list of files that is no list of paths",
    "url": "an address on a network, or data inside of the record, in the place of a file",
    "missing file": "a file that is not there",
    "no file": "a folder or device in the place of a file, or what is no path",
    "broken file": "a file that cannot be read or decoded",
    "no encoder": "media that the model cannot take",
    "size": "a picture of a size that the encoder or its processor refuses",
    "template": "a chat that the chat template or the processor refuses",
    "placeholder": "text that contains a placeholder or another special token that stands for media",
    "too long": "more tokens than data.max_tokens",
}
"""Kinds of errors of a record -> description."""


class BrokenSampleError(ValueError):
    """A record or a medium that cannot be a sample; `kind` is a key of BROKEN, the message has the details."""

    def __init__(self, kind: str, reason: str) -> None:
        assert kind in BROKEN, kind
        super().__init__(reason)
        self.kind = kind


class DecodeError(ValueError):
    """An unusable file; the message has its name and the reason."""
