"""Every implementation of the mask rule against one table: `table` makes the pairs, `masks/rule.py` has the rule.

The implementations: the rule itself, the kernels' predicate (kernels/bitfield_common.py), bounds of blocks in Triton
(kernels/bitfield_plan.py) and in C++ (csrc/attention_cpu/block_lists.cpp), and the tiles of the CPU backend
(csrc/attention_cpu/mask_tile.inc).
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from tests.attention import interpreter
from tests.attention.plan_lists import listed, states
from tests.mask_strategies import rule
from tests.masks import table, triton_rule
from tests.masks.seen import backward_sees, forward_sees

# ---------------------------------------------------------------------- the table


def test_every_field_has_rows_and_values():
    assert table.FIELDS == tuple(inspect.signature(BitfieldMask).parameters)
    rows = {row.field for row in table.ROWS}
    assert [field for field in table.FIELDS if field not in rows] == [], "fields of the mask without a row in the table"
    assert [name for name in table.SETTINGS if name not in table.BASE] == [], "settings without a value in BASE"


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.rule)
def test_rows_are_decided_by_their_field(row):
    assert {table.field_of(name) for name in (*row.seen, *row.hidden)} == {row.field}
    for seen in (True, False):
        queries, keys = table.case(row, seen)
        assert queries.to_dense(keys).item() == rule(queries, keys).item() == seen


def test_each_two_fields_decide_together():
    """For any two fields there is a pair of tokens whose result either of them changes."""
    result = table.decisive()
    alone = [pair for pair in itertools.combinations(table.FIELDS, 2) if not (result[pair[0]] & result[pair[1]]).any()]
    assert alone == []


@pytest.mark.parametrize("field", table.FIELDS)
def test_the_table_notices_a_forgotten_field(field):
    assert any(not torch.equal(table.without(field, *masks), masks[0].to_dense(masks[1])) for masks in table.masks())


def test_fields_of_a_plan_are_those_of_the_rule():
    mask = BitfieldMask.causal(1, 3)
    plan = AttentionPlan.build(mask)
    assert all(torch.equal(one, other) for one, other in zip(plan.queries(), mask.tokens()))
    assert all(torch.equal(one, other) for one, other in zip(plan.keys(), mask.tokens()))


# ---------------------------------------------------------------------- the rule in Python


def test_python_rule():
    for queries, keys in table.masks():
        table.agree(rule(queries, keys), queries, keys, "tests/mask_strategies.py")


# ---------------------------------------------------------------------- C++


def test_cpu_tiles():
    for queries, keys in table.masks():
        table.agree(forward_sees("cpu", queries, keys, 64), queries, keys, "mask_tile.inc, forward")
        table.agree(backward_sees("cpu", queries, keys, 64), queries, keys, "mask_tile.inc, backward")


@pytest.mark.parametrize("field", table.FIELDS)
@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_cpu_bounds_of_blocks(field, block):
    for queries, keys in table.masks(fastest=field):
        plan = AttentionPlan.build(queries, keys, block=block)
        wanted = states(queries.to_dense(keys), block)
        assert torch.equal(listed(plan, "q"), wanted) and torch.equal(listed(plan, "k"), wanted), queries.sinks


# ---------------------------------------------------------------------- Triton


@pytest.fixture(scope="module")
def worker():
    with interpreter.Worker() as worker:
        yield worker


@pytest.mark.parametrize("name", triton_rule.CASES)
def test_triton(worker, name):
    pytest.importorskip("triton")
    if problem := worker.run(name):
        pytest.fail(problem, pytrace=False)
