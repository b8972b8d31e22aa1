"""Truth table of the mask rule: (query, key) pairs for every field, alone and combined with all others.

A row of the table is decided by one field: with `seen` the query sees the key, with `hidden` it does not. The values of
all rows are combined to tokens: each combination of values on the query side meets each one on the key side. So a new
field of the mask needs values in BASE and at least one row in ROWS. All implementations of the rule are then tested
with it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.masks import KEY_FIELDS, NO_WINDOW, QUERY_FIELDS, BitfieldMask, Tokens, visible, word

FIELDS = (*Tokens._fields, "sinks")
SETTINGS = (*(f"q_{name}" for name in QUERY_FIELDS), *(f"k_{name}" for name in KEY_FIELDS), "sinks")

# A query that sees a key of another stream at its own position.
BASE = {
    "q_bits": word(0, [1]), "q_doc": 0, "q_span": -1, "q_pos": 5, "q_window": NO_WINDOW,
    "k_bits": word(1), "k_doc": 0, "k_span": -1, "k_pos": 5, "sinks": 0,
}  # fmt: skip


class Row(NamedTuple):
    """`given` changes BASE; `seen` and `hidden` change `field` in addition, and nothing else."""

    field: str
    rule: str
    given: dict[str, int]
    seen: dict[str, int]
    hidden: dict[str, int]


CAUSAL_QUERY = {"q_bits": word(0, [1], causal=True)}
UNATTENDED_KEY = {"k_bits": word(2)}

ROWS = (
    Row("bits", "a key's stream is attended or not", {}, {"k_bits": word(1)}, {"k_bits": word(2)}),
    Row("bits", "a query attends the stream or not", {}, {"q_bits": word(0, [1])}, {"q_bits": word(0, [0])}),
    Row("bits", "a causal query sees no later key", {"k_pos": 6}, {"q_bits": word(0, [1])}, CAUSAL_QUERY),
    Row("doc", "documents do not see each other", {}, {"k_doc": 0}, {"k_doc": 1}),
    Row("doc", "padding does not see padding", {}, {"q_doc": 0, "k_doc": 0}, {"q_doc": -1, "k_doc": -1}),
    Row("span", "a span sees itself", UNATTENDED_KEY, {"q_span": 3, "k_span": 3}, {"q_span": 3, "k_span": 4}),
    Row("span", "no span is not a span", UNATTENDED_KEY, {"q_span": 3, "k_span": 3}, {"q_span": -1, "k_span": -1}),
    Row("span", "a span ignores the order", {**CAUSAL_QUERY, "k_pos": 6, "q_span": 3}, {"k_span": 3}, {"k_span": -1}),
    Row("pos", "a causal query sees keys up to its own position", CAUSAL_QUERY, {"k_pos": 5}, {"k_pos": 6}),
    Row("pos", "a later causal query sees more", {**CAUSAL_QUERY, "k_pos": 6}, {"q_pos": 6}, {"q_pos": 5}),
    Row("pos", "keys at the end of a window are not seen", {"q_window": 2}, {"k_pos": 4}, {"k_pos": 3}),
    Row("pos", "a sink is a position", {"q_pos": 6, "q_window": 2, "sinks": 4}, {"k_pos": 3}, {"k_pos": 4}),
    Row("window", "a window ends before its length", {"k_pos": 3}, {"q_window": 3}, {"q_window": 2}),
    Row("window", "spans end at windows", {"q_span": 3, "k_span": 3, "k_pos": 3}, {"q_window": 3}, {"q_window": 2}),
    Row("sinks", "sinks pass the window", {"q_window": 2, "k_pos": 3}, {"sinks": 4}, {"sinks": 0}),
)  # fmt: skip


def field_of(setting: str) -> str:
    """The field that a setting belongs to: q_pos and k_pos are both "pos"."""
    return setting if setting == "sinks" else setting[2:]


def values(setting: str) -> list[int]:
    """All values of a setting that occur in the table, BASE first."""
    result = [BASE[setting]]
    for row in ROWS:
        result += [change[setting] for change in (row.given, row.seen, row.hidden) if setting in change]
    return list(dict.fromkeys(result))


def case(row: Row, seen: bool) -> tuple[BitfieldMask, BitfieldMask]:
    """The query and the key of a row, as masks of one token."""
    settings = {**BASE, **row.given, **(row.seen if seen else row.hidden)}
    return tuple(
        BitfieldMask(
            **{name: _tensor(name, [[settings[f"{side}_{name}"]]]) for name in fields}, sinks=settings["sinks"]
        )
        for side, fields in (("q", QUERY_FIELDS), ("k", KEY_FIELDS))
    )


def decisive() -> dict[str, Tensor]:
    """For each field a bool array, one axis per setting: True where another value of the field changes the result."""
    *lists, sinks = (values(name) for name in SETTINGS)
    columns = dict(zip(SETTINGS, torch.cartesian_prod(*map(torch.tensor, lists)).unbind(-1)))
    unread = torch.tensor(NO_WINDOW)
    q, k = (Tokens(*(columns.get(f"{side}_{name}", unread) for name in Tokens._fields)) for side in "qk")
    result = torch.stack([visible(q, k, number) for number in sinks], -1)
    result = result.view([len(result) for result in (*lists, sinks)])
    found = {field: torch.zeros_like(result) for field in FIELDS}
    for axis, name in enumerate(SETTINGS):
        found[field_of(name)] |= result.any(axis, keepdim=True) & ~result.all(axis, keepdim=True)
    return found


def masks(fastest: str = "") -> list[tuple[BitfieldMask, BitfieldMask]]:
    """All queries and all keys of the table, once per number of sinks.

    fastest: the field in which neighbouring tokens differ, so that blocks mix its values. A span must not occur in two
    documents of a row. So row b of the batch has keys with spans in one document only.
    """
    documents = sorted(doc for doc in values("k_doc") if doc >= 0)
    queries = _tokens("q", QUERY_FIELDS, fastest)
    keys = _tokens("k", KEY_FIELDS, fastest)
    rows = [[token for token in keys if token["span"] < 0 or token["doc"] in (-1, document)] for document in documents]
    return [
        (_mask([queries] * len(documents), QUERY_FIELDS, sinks), _mask(rows, KEY_FIELDS, sinks))
        for sinks in values("sinks")
    ]


def _tokens(side: str, fields: tuple[str, ...], fastest: str) -> list[dict[str, int]]:
    order = sorted(fields, key=lambda name: name == fastest)
    combined = itertools.product(*(values(f"{side}_{name}") for name in order))
    return [dict(zip(order, token)) for token in combined]


def _mask(rows: list[list[dict[str, int]]], fields: tuple[str, ...], sinks: int) -> BitfieldMask:
    columns = {name: _tensor(name, [[token[name] for token in row] for row in rows]) for name in fields}
    return BitfieldMask(**columns, sinks=sinks)


def _tensor(name: str, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64 if name == "bits" else torch.int32)


def without(field: str, queries: BitfieldMask, keys: BitfieldMask) -> Tensor:
    """The dense mask if `field` were forgotten: all tokens have the value of BASE."""

    def plain(side: str, mask: BitfieldMask) -> BitfieldMask:
        if field == "sinks":
            return BitfieldMask.from_tokens(mask.tokens())
        if f"{side}_{field}" not in BASE:
            return mask
        tokens = mask.tokens()
        changed = torch.full_like(getattr(tokens, field), BASE[f"{side}_{field}"])
        return BitfieldMask.from_tokens(tokens._replace(**{field: changed}), mask.sinks)

    return plain("q", queries).to_dense(plain("k", keys))


def agree(seen: Tensor, queries: BitfieldMask, keys: BitfieldMask, what: str) -> None:
    """Raise AssertionError unless `seen`, bool [B, Tq, Tk], follows the rule for all pairs."""
    wrong = (seen != queries.to_dense(keys)).nonzero()
    if len(wrong):
        b, i, j = wrong[0].tolist()
        query, key = (
            {name: int(getattr(mask.tokens(), name)[b, at]) for name in fields}
            for mask, at, fields in ((queries, i, QUERY_FIELDS), (keys, j, KEY_FIELDS))
        )
        forgotten = [field for field in FIELDS if torch.equal(seen, without(field, queries, keys))]
        raise AssertionError(
            f"{what}: {len(wrong)} of {seen.numel()} pairs are not as the rule says, first: query {query} "
            f"{'sees' if seen[b, i, j] else 'does not see'} key {key} with {queries.sinks} sinks"
            + "".join(f"; this is the rule without {field!r}" for field in forgotten)
        )
