"""plan.reconfigure: the paper's three cases; it works for every sequence of failures above the threshold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.printed_oobleck import combinations
from interlace import plan


def summary(result):
    return [(pipeline.nodes, pipeline.sources, pipeline.change) for pipeline in result]


def test_figure_2_8():
    assert summary(plan.reconfigure([[0, 1, 2, 3], [4, 5]], {2}, [2, 3, 4])) == [
        ((0, 1, 3), (0,), "shrunk"),
        ((4, 5), (1,), "kept"),
    ]
    assert summary(plan.reconfigure([[0, 1], [2, 3, 4]], {1}, [2, 3, 4])) == [
        ((0, 4), (0, 1), "borrowed"),
        ((2, 3), (1,), "lent"),
    ]
    assert summary(plan.reconfigure([[0, 1], [2, 3], [4, 5]], {3}, [2, 3, 4])) == [
        ((0, 1, 2), (0, 1), "merged"),
        ((4, 5), (2,), "kept"),
    ]


def test_a_merger_that_is_still_too_small_borrows():
    result = plan.reconfigure([[0, 8, 9], [1, 10, 11], [2, 3, 4, 5]], {8, 9, 10, 11}, [3, 4, 5, 6], faults=1)
    assert summary(result) == [((0, 1, 5), (0, 1, 2), "merged"), ((2, 3, 4), (2,), "lent")]


def test_a_lost_pipeline_is_dropped_unless_it_is_needed():
    assert [p.sources for p in plan.reconfigure([[0, 1], [2, 3, 4, 5]], {0, 1}, [2, 3, 4])] == [(1,)]
    assert summary(plan.reconfigure([[0, 1], [2, 3, 4, 5]], {0, 1}, [2, 3, 4], faults=1)) == [
        ((5, 4), (0, 1), "borrowed"),
        ((2, 3), (1,), "lent"),
    ]


def check_storm(data):
    faults, least = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    nodes = data.draw(st.integers((faults + 1) * least, (faults + 1) * least + 12))
    sizes = plan.node_counts(nodes, faults, least).tolist()
    counts = data.draw(st.sampled_from(list(combinations(sizes, nodes, faults + 1))[:50]))
    names = iter(range(nodes))
    pipelines = [[next(names) for _ in range(n)] for n, count in zip(sizes, counts) for _ in range(count)]
    alive = set(range(nodes))
    while True:
        failed = data.draw(st.sets(st.sampled_from(sorted(alive)), max_size=4))
        alive -= failed
        if len(alive) < (faults + 1) * least:
            with pytest.raises(ValueError, match="nodes remain, too few for"):
                plan.reconfigure(pipelines, failed, sizes, faults=faults)
            return
        before = [list(p) for p in pipelines]
        result = plan.reconfigure(pipelines, failed, sizes, faults=faults)
        assert [list(p) for p in pipelines] == before  # pure
        assert sorted(node for p in result for node in p.nodes) == sorted(alive)
        assert len(result) > faults and all(len(p.nodes) in sizes for p in result)
        for pipeline in result:
            if pipeline.change == "kept":
                assert list(pipeline.nodes) == list(pipelines[pipeline.sources[0]])
            homes = {i for i, old in enumerate(pipelines) for node in pipeline.nodes if node in old}
            assert homes <= set(pipeline.sources)
        pipelines = [p.nodes for p in result]
        if not failed:
            return


@given(st.data())
def test_storms_of_failures(data):
    check_storm(data)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.data())
def test_many_storms_of_failures(data):
    check_storm(data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.reconfigure([[0, 1], [1]], [], [1, 2]), r"pipelines\[1\] repeats node 1"),
        (lambda: plan.reconfigure([[0, 1]], [], [2, 4]), "consecutive"),
        (lambda: plan.reconfigure([[0, 1]], [0, 1], [1, 2]), "0 nodes remain, too few for 1 pipelines"),
        (lambda: plan.reconfigure([[0, 1, 2]], [], [1, 2]), r"keeps 3 nodes, more than the largest template \(2\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_joined_nodes_make_pipelines_or_grow_the_smallest():
    assert summary(plan.admit([[0, 1], [2, 3]], [7, 8], [2, 3])) == [
        ((0, 1), (0,), "kept"),
        ((2, 3), (1,), "kept"),
        ((7, 8), (), "new"),
    ]
    assert summary(plan.admit([[0, 1, 4], [2, 3]], [7], [2, 3])) == [
        ((0, 1, 4), (0,), "kept"),
        ((2, 3, 7), (1,), "grown"),
    ]
    # No batch for a third pipeline, and no template of five nodes: one node is unused.
    assert summary(plan.admit([[0, 1], [2, 3]], [5, 6, 7, 8, 9], [2, 3, 4], max_pipelines=2)) == [
        ((0, 1, 5, 7), (0,), "grown"),
        ((2, 3, 6, 8), (1,), "grown"),
    ]
    with pytest.raises(ValueError, match=r"pipelines\[1\] repeats node 0"):
        plan.admit([[0, 1]], [0], [2])


def test_spare_nodes_join_after_repair_or_earlier_if_needed():
    nodes = [0, 1, 2, 3, 4, 7, 8]
    assert plan.regroup([[0, 1, 4], [2, 3]], {3}, nodes, [2, 3], faults=1) == [(0, 1), (2, 4), (7, 8)]
    assert plan.regroup([[0, 1], [2, 3]], {0, 3}, nodes[:3] + [7, 8], [2, 3], faults=1) == [(7, 1), (2, 8)]
    assert plan.regroup([[0, 1], [2, 3]], {0, 3}, [1, 2, 7], [2, 3], faults=1) is None
    # A merger of five nodes; templates have three at most: the others wait.
    assert plan.regroup([[0, 1, 2], [3, 4, 5]], {5}, nodes[:5], [3], faults=0) == [(0, 1, 2)]


@given(st.data())
def test_joins_touch_as_little_as_they_can(data):
    least, span = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    sizes = list(range(least, least + span + 1))
    names = iter(range(1000))
    pipelines = [[next(names) for _ in range(n)] for n in data.draw(st.lists(st.sampled_from(sizes), max_size=5))]
    joined = [next(names) for _ in range(data.draw(st.integers(0, 14)))]
    most = data.draw(st.one_of(st.none(), st.integers(1, 8)))
    result = plan.admit(pipelines, joined, sizes, max_pipelines=most)
    assert all(list(new.nodes[: len(old)]) == old for new, old in zip(result, pipelines))
    assert all(len(p.nodes) in sizes for p in result)
    inside = [node for p in result for node in p.nodes]
    assert len(inside) == len(set(inside)) and set(inside) <= {n for p in pipelines for n in p} | set(joined)
    left = set(joined) - set(inside)
    fresh = result[len(pipelines) :]
    room = most is None or len(result) < most
    assert not left or (all(len(p.nodes) == sizes[-1] for p in result) and not (room and len(left) >= least))
    assert len(fresh) == min(len(joined) // least, max(0, most - len(pipelines)) if most is not None else len(joined))
    assert sum(p.change == "grown" for p in result) <= len(joined) - least * len(fresh)
