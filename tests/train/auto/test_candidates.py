"""The list of candidates: complete, and each equals the layout of its config."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from interlace.layout import ParallelSpec
from interlace.train.auto.candidates import Candidate, Fixed, Openings, applied, layouts, listed, with_schedules
from tests.train.auto.oracle import config_of
from tests.train.build import _config

OPEN = Openings(8, 2, ("none",))
TWO, THREE = ("vision", "language_model"), ("vision", "audio", "language_model")


@pytest.mark.parametrize(("modules", "world"), [(TWO, 1), (TWO, 3), (TWO, 4), (THREE, 2)])
def test_candidates_are_of_the_world_that_they_are_listed_for(modules: tuple[str, ...], world: int) -> None:
    config = _config("parallel.layout=auto") if modules == THREE else config_of((4, 4))
    result = list(listed(modules, world, OPEN))
    assert len(set(result)) == len(result) and {each.world for each in result} == {world}
    accepted = 0
    for candidate in result[:: max(1, len(result) // 80)]:
        try:
            made = applied(config, candidate)
        except ValidationError:
            continue
        accepted += 1
        assert made.world_size() == world and not made.parallel.auto
        assert (made.train.microbatches, made.parallel.schedule) == (2, "1f1b")
        for name, spec in candidate.specs if candidate.placement != "chain" else ():
            own = made.parallel.module(name)
            degrees = (own.tp, own.cp, own.pp, made.parallel.replicas(name), own.shard)
            assert degrees == (spec.tp, spec.cp, spec.pp, spec.dp, spec.shard), (candidate, name)
    assert accepted


degree = st.sampled_from([1, 2, 3, 4])
specs = st.builds(ParallelSpec, degree, degree, degree, degree)


@settings(max_examples=150, deadline=None)
@given(placement=st.sampled_from(["parallel", "colocated", "shared", "replicated"]), pair=st.tuples(specs, specs))
def test_every_layout_that_a_config_could_say_is_listed(
    placement: str, pair: tuple[ParallelSpec, ParallelSpec]
) -> None:
    """Drawn independently of the list, and validated by the config itself."""
    config = config_of((4, 4))
    asked = Candidate(placement, tuple(zip(TWO, pair, strict=True)), 8, 2)
    try:
        world = applied(config, asked).world_size()
    except ValidationError:
        return
    if world > 4:
        return
    if placement == "replicated" and pair[1].pp == 1:  # then each rank has its whole replica
        asked = Candidate("colocated", asked.specs, 8, 2, ranks=1)
    if placement == "parallel":  # one encoder alone has no other module to be colocated with
        asked = Candidate("colocated", asked.specs, 8, 2)
    if placement == "shared" and world == 1:
        asked = Candidate("colocated", asked.specs, 8, 2, ranks=1)
    assert asked in set(listed(TWO, world, OPEN))


def test_long_lists_have_powers_of_two_and_equal_encoders() -> None:
    for placement, result, _ in layouts(THREE, 12, few=False):
        assert result[0] == result[1]
        lanes = [spec.tp * spec.cp * spec.pp for spec in result]
        assert placement == "chain" or all(count & (count - 1) == 0 for count in lanes)


def test_what_is_written_by_hand_stays() -> None:
    config = config_of((4, 4), placement="colocated", language_model={"tp": 2, "shard": "none"})
    fixed = Fixed.of(config)
    result = [each for each in listed(TWO, 4, OPEN) if fixed.allows(each)]
    assert result and {each.placement for each in result} == {"colocated"}
    assert {each.of["language_model"].tp for each in result} == {2}
    assert {each.of["language_model"].shard for each in result} == {"none"}
    assert {each.of["vision"].tp for each in result} == {1, 2}
    assert applied(config, result[0]).parallel.language_model.tp == 2


def test_schedules_for_virtual_stages_have_them() -> None:
    pair = (("vision", ParallelSpec()), ("language_model", ParallelSpec(pp=2)))
    result = {each.schedule: each for each in with_schedules(Candidate("colocated", pair, 8, 4))}
    language = {name: each.of["language_model"] for name, each in result.items()}
    assert {"gpipe", "zb_h1", "interleaved", "zb_v"} <= result.keys() and "1f1b" not in result
    assert (language["interleaved"].virtual, language["zb_v"].order, language["zb_h1"].virtual) == (2, "v", 1)
    for each in result.values():
        assert applied(config_of((4, 4)), each).parallel.schedule == each.schedule


def test_microbatches_that_are_open() -> None:
    assert Openings(16, None, ("none",)).counts(2, 1) == [1, 2, 4]
    assert 3 in Openings(16, None, ("none",)).counts(2, 3)
    assert Openings(16, 5, ("none",)).counts(2, 3) == [5]
    assert Openings(16, 5, ("none",), rows=True).counts(2, 3) == [8]  # a batch of packed rows allows equally many
