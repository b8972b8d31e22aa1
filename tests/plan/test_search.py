"""plan.search_configuration against every configuration, priced by an independent cost function.

Its in-flight counts are compared with 1F1B as a table of times.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan
from interlace.layout import ParallelSpec
from interlace.plan.search import in_flight

LLM = "language_model"
BYTES = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "input_bytes")


class Problem:
    """A problem and the cost of its configurations, in plain loops over layers, stages and modules.

    A configuration is dp, placement and per module (tp, cp, pp, recompute).
    """

    def __init__(self, modules, gpus, batch, microbatch, memory, links, dp, placements, allocation, recompute):
        self.modules, self.gpus, self.batch, self.microbatch = modules, gpus, batch, microbatch
        self.memory, self.links, self.dp = memory, links, dp
        self.placements, self.allocation, self.recompute = placements, allocation, recompute
        self.encoders = [name for name in modules if name != LLM]

    def search(self):
        return plan.search_configuration(
            self.modules,
            self.gpus,
            self.batch,
            self.microbatch,
            gpu_memory=self.memory,
            **{f"{name}_link": plan.LinkModel(*link) for name, link in self.links.items()},
            dp=self.dp,
            placements=self.placements,
            allocation=self.allocation,
            recompute=self.recompute,
        )

    def send(self, link, size):
        latency, per_byte = self.links[link]
        return latency + per_byte * size if size > 0 else 0.0

    def reduce(self, link, size, ranks):
        """A ring: reduce-scatter and all-gather, n - 1 steps each, a part of 1 / n in each step."""
        return sum(self.send(link, size / ranks) for _ in range(2 * (ranks - 1)))

    def layer_seconds(self, name, tp, cp, again):
        module = self.modules[name]
        seconds = []
        for i in range(len(module.weight_bytes)):
            forward, backward = float(module.forward[tp, cp][i]), float(module.backward[tp, cp][i])
            calls = 0 if module.tensor_reduces is None else module.tensor_reduces[i]
            summed = calls * self.reduce("tensor", module.input_bytes[i] / cp, tp)
            total = forward + summed
            if backward > 0:
                total += backward + summed
                if again:
                    total += forward + summed
            seconds.append(total)
        return seconds

    def stages(self, name, tp, cp, pp, again):
        """[(first layer, one past the last, seconds)] per stage; the cut is `partition`'s, and no other is better."""
        seconds = self.layer_seconds(name, tp, cp, again)
        bounds = plan.partition(seconds, pp)
        every = (
            max(math.fsum(seconds[a:b]) for a, b in itertools.pairwise((0, *inner, len(seconds))))
            for inner in itertools.combinations(range(1, len(seconds)), pp - 1)
        )
        result = [(int(a), int(b), math.fsum(seconds[a:b])) for a, b in itertools.pairwise(bounds)]
        assert max(s for *_, s in result) <= min(every) * (1 + 1e-12)
        return result

    def peaks(self, chosen, placement, dp):
        """Bytes of the fullest GPU of every module; colocated encoders share theirs."""
        count = self.batch // (dp * self.microbatch)
        held = {}
        for name, (tp, cp, pp, again) in chosen.items():
            module = self.modules[name]
            held[name] = []
            for index, (a, b, _) in enumerate(self.stages(name, tp, cp, pp, again)):
                flight = min(count, pp - index + (0 if name == LLM else chosen[LLM][2]))
                total, rerun = 0.0, 0.0
                for i in range(a, b):
                    total += (module.weight_bytes[i] + module.gradient_bytes[i]) / tp
                    total += module.optimizer_bytes[i] / (tp * cp * dp)
                    if module.backward[tp, cp][i] > 0:
                        total += flight * (module.input_bytes if again else module.activation_bytes)[i] / (tp * cp)
                        rerun = max(rerun, module.activation_bytes[i] / (tp * cp))
                held[name].append((total, rerun if again else 0.0))
        if placement == "colocated" and self.encoders:
            rows = [held[name] for name in self.encoders]
            together = max(
                sum(total for total, _ in stage) + max(rerun for _, rerun in stage) for stage in zip(*rows, strict=True)
            )
            return {name: together for name in self.encoders} | {LLM: max(map(sum, held[LLM]))}
        return {name: max(map(sum, stages)) for name, stages in held.items()}

    def time(self, chosen, placement, dp):
        """Eq. 4.2 with all terms; infinite if the memory limit is exceeded."""
        if max(self.peaks(chosen, placement, dp).values()) > self.memory:
            return math.inf
        count = self.batch // (dp * self.microbatch)
        groups = [[name] for name in self.encoders] if placement == "parallel" else [self.encoders]
        groups = [group for group in groups if group] + [[LLM]]
        fills, slowest, syncs, reshards = [], [], [], 0.0
        for group in groups:
            tp, cp, pp, again = chosen[group[0]]
            cuts = [self.stages(name, tp, cp, pp, again) for name in group]
            fill = 0.0
            for s in range(pp):
                seconds = sum(own[s][2] for own in cuts)
                slowest.append(seconds)
                fill += seconds
                gradients = sum(sum(self.modules[n].gradient_bytes[c[s][0] : c[s][1]]) for n, c in zip(group, cuts))
                syncs.append(self.reduce("data", gradients / tp, dp * cp))
                if s == 0:
                    continue
                there = back = 0.0
                for name, own in zip(group, cuts, strict=True):
                    size = self.modules[name].input_bytes[own[s][0]] / (tp * cp)
                    there += size
                    if any(self.modules[name].backward[tp, cp][i] > 0 for i in range(own[s][0])):
                        back += size
                fill += self.send("stage", there) + self.send("stage", back)
            if group != [LLM]:
                own_tp, own_cp, *_ = chosen[LLM]
                way = self.send("stage", self.modules[LLM].input_bytes[0] / (own_tp * own_cp))
                if any((self.modules[name].backward[tp, cp] > 0).any() for name in group):
                    way *= 2
                fill += way
                reshards += way * ((tp, cp) != (own_tp, own_cp))
            fills.append(fill)
        longest = fills[-1] + max(fills[:-1], default=0.0)
        return longest + (count - 1) * max(slowest) + count * reshards + max(syncs)

    def shares(self, groups, budget):
        """Largest remainder, at least one GPU each (algorithm 3, line 4)."""
        work = []
        for group in groups:
            least = [min(self.modules[name].forward) for name in group]
            work.append(
                sum(
                    math.fsum(self.modules[n].forward[k]) + math.fsum(self.modules[n].backward[k])
                    for n, k in zip(group, least, strict=True)
                )
            )
        return plan.proportional_allocation(budget, work).tolist()

    def every(self):
        """(dp, placement, chosen) of every configuration that the GPUs allow."""
        for dp in range(1, self.gpus + 1) if self.dp is None else self.dp:
            if dp > self.gpus or self.batch % (dp * self.microbatch):
                continue
            budget = self.gpus // dp
            options = {
                name: [
                    (tp, cp, pp, again)
                    for tp, cp in module.forward
                    for pp in range(1, len(module.weight_bytes) + 1)
                    for again in self.recompute
                    if tp * cp * pp <= budget
                ]
                for name, module in self.modules.items()
            }
            for placement in self.placements:
                groups = [[n] for n in self.encoders] if placement == "parallel" else [self.encoders]
                groups = [group for group in groups if group] + [[LLM]]
                if self.allocation == "proportional":
                    if budget < len(groups):
                        continue
                    wanted = self.shares(groups, budget)
                for choice in itertools.product(*(options[group[0]] for group in groups)):
                    used = [tp * cp * pp for tp, cp, pp, _ in choice]
                    if sum(used) > budget or (self.allocation == "proportional" and used != wanted):
                        continue
                    chosen = {name: own for group, own in zip(groups, choice, strict=True) for name in group}
                    if all(chosen[name] in options[name] for name in chosen):
                        yield dp, placement, chosen


def check(problem):
    best = min((problem.time(chosen, placement, dp) for dp, placement, chosen in problem.every()), default=math.inf)
    if best == math.inf:
        with pytest.raises(ValueError, match="no configuration fits"):
            problem.search()
        return
    result = problem.search()
    assert result.iteration_time == pytest.approx(best, rel=1e-12)
    assert result.throughput == (pytest.approx(problem.batch / best) if best else math.inf)
    # The reported cost is the actual cost.
    dp = result.layout.data_parallel[LLM]
    chosen = {name: (s.tp, s.cp, s.pp, result.recompute[name]) for name, s in result.specs.items()}
    assert problem.time(chosen, result.layout.placement, dp) == pytest.approx(best, rel=1e-12)
    assert result.peak_bytes == pytest.approx(problem.peaks(chosen, result.layout.placement, dp))
    assert result.microbatches * dp * problem.microbatch == problem.batch
    check_layout(problem, result, chosen)


def check_layout(problem, found, chosen):
    """Cuts are optimal; every replica has its own ranks, numbered as in `Layout.from_specs`."""
    layout, order = found.layout, [*problem.encoders, LLM]
    assert layout.world <= problem.gpus and list(layout.modules) == order
    for name, (tp, cp, pp, again) in chosen.items():
        assert layout.spec(name) == found.specs[name] == ParallelSpec(tp, cp, pp, layout.data_parallel[LLM])
        for pipeline in layout.pipelines(name):
            cuts = [(stage.start, stage.stop) for stage in pipeline.stages]
            assert cuts == [(a, b) for a, b, _ in problem.stages(name, tp, cp, pp, again)]
            assert all(not stage.copies for stage in pipeline.stages)
    width, used = layout.world // layout.data_parallel[LLM], []
    for replica in range(layout.data_parallel[LLM]):
        homes = [[stage.lane for stage in layout.pipelines(name)[replica].stages] for name in order]
        if layout.placement == "colocated":
            assert all(home == homes[0] for home in homes[:-1])
            homes = [*homes[:1], *homes[-1:]] if problem.encoders else homes
        used.append([rank for home in homes for lane in home for rank in lane.ranks])
    assert used == [[*range(replica * width, (replica + 1) * width)] for replica in range(len(used))]


@st.composite
def problems(draw):
    degrees = [(1, 1), (2, 1), (1, 2), (2, 2)]
    encoders = draw(st.integers(0, 2))
    modules = {}
    for name in [*(f"encoder{i}" for i in range(encoders)), LLM]:
        layers = draw(st.integers(1, 3 if encoders < 2 else 2))
        row = lambda most, layers=layers: np.array(  # noqa: E731
            draw(st.lists(st.integers(0, most), min_size=layers, max_size=layers)), dtype=float
        )
        keys = draw(st.sets(st.sampled_from(degrees), min_size=1, max_size=3 if encoders < 2 else 2))
        trained = draw(st.sampled_from([0.0, 1.0, None]))
        backward = row(9) if trained is None else None
        base = row(8)
        forward = {key: base / (key[0] * key[1]) ** 0.75 for key in keys}
        modules[name] = plan.SearchModule(
            forward,
            {key: (f * 2 * trained if backward is None else backward / key[0]) for key, f in forward.items()},
            *(row(6) for _ in BYTES),
            tensor_reduces=row(2) if draw(st.booleans()) else None,
        )
    if draw(st.booleans()):  # the language model need not come last
        modules = dict(reversed(modules.items()))
    link = st.sampled_from([(0.0, 0.0), (0.25, 0.125), (0.0, 0.5), (2.0, 0.0)])
    microbatch = draw(st.integers(1, 2))
    return Problem(
        modules,
        draw(st.integers(1, 6)),
        microbatch * draw(st.sampled_from([1, 2, 4, 6])),
        microbatch,
        draw(st.sampled_from([math.inf, math.inf, 10.0, 25.0, 45.0])),
        {name: draw(link) for name in ("stage", "tensor", "data")},
        draw(st.sampled_from([None, None, [1], [2, 3]])),
        draw(st.sampled_from([("parallel", "colocated"), ("parallel",), ("colocated",)])),
        draw(st.sampled_from(["any", "any", "any", "proportional"])),
        draw(st.sampled_from([(False, True), (False,), (True,)])),
    )


def has_work(problem):
    """proportional_allocation refuses a model without any work."""
    return problem.allocation == "any" or any(
        (row > 0).any() for module in problem.modules.values() for row in module.forward.values()
    )


@settings(max_examples=150)
@given(problems().filter(has_work))
def test_search_finds_the_best_of_all(problem):
    check(problem)


@pytest.mark.slow
@settings(max_examples=500)
@given(problems().filter(has_work))
def test_search_finds_the_best_of_all_in_many_cases(problem):
    check(problem)


def module(rng, layers, frozen=False, degrees=((1, 1), (2, 1), (1, 2))):
    base = rng.integers(1, 9, layers).astype(float)
    forward = {(tp, cp): base / (tp * cp) ** 0.75 for tp, cp in degrees}
    backward = {key: row * (0 if frozen else 2) for key, row in forward.items()}
    size = lambda: rng.integers(0, 9, layers).astype(float)  # noqa: E731
    return plan.SearchModule(forward, backward, size(), size() * (not frozen), size(), size() + 3, size() / 8)


def test_every_term_of_the_cost_can_decide():
    """One layer each, so that there are few alternatives and their costs can be computed by hand."""
    one = np.ones(1)

    def chosen(forward, backward, *, gpus=2, batch=4, microbatch=1, reduces=0.0, activation=1.0, **options):
        only = plan.SearchModule(forward, backward, one, one, one, one * activation, one, one * reduces)
        result = plan.search_configuration({LLM: only}, gpus, batch, microbatch, **options)
        return result.specs[LLM], result.recompute[LLM], result.iteration_time

    split = {(1, 1): one * 4, (2, 1): one * 2}
    # Two replicas and one tensor-parallel pair both take 2 microbatches of 12 or 4 of 6 seconds; ties go to fewer dp.
    twice = {key: row * 2 for key, row in split.items()}
    assert chosen(split, twice) == (ParallelSpec(tp=2), False, 24.0)
    # All-reduces: one for the forward, one for the backward, each 2 (n - 1) = 2 steps of half a byte: 1 second.
    slow = plan.LinkModel(0.25, 0.5)
    assert chosen(split, twice, reduces=1.0, tensor_link=slow) == (ParallelSpec(dp=2), False, 24.0)
    assert chosen(split, twice, reduces=1.0, tensor_link=slow, dp=[1]) == (ParallelSpec(tp=2), False, 32.0)
    # The gradients' all-reduce, also 2 steps of half a byte.
    assert chosen({(1, 1): one * 4}, {(1, 1): one * 8}, data_link=slow) == (ParallelSpec(dp=2), False, 25.0)
    # Recomputation repeats the forward and is used only if memory requires it: 3 bytes and 10 of activations.
    whole = {"batch": 1, "gpus": 1, "activation": 10.0}
    assert chosen({(1, 1): one * 4}, {(1, 1): one * 8}, gpu_memory=13.0, **whole)[1:] == (False, 12.0)
    two = plan.SearchModule(
        {(1, 1): np.ones(2)}, {(1, 1): np.ones(2)}, *(np.zeros(2) for _ in range(3)), np.full(2, 10.0), np.ones(2)
    )
    kept = plan.search_configuration({LLM: two}, 1, 1, 1, gpu_memory=20.0)
    again = plan.search_configuration({LLM: two}, 1, 1, 1, gpu_memory=12.0)  # two inputs, and one layer at a time
    assert (kept.recompute[LLM], kept.iteration_time, kept.peak_bytes[LLM]) == (False, 4.0, 20.0)
    assert (again.recompute[LLM], again.iteration_time, again.peak_bytes[LLM]) == (True, 6.0, 12.0)
    # Transfers between stages (hidden state and gradient) count once, for the passage of one microbatch.
    slow = plan.LinkModel(0.5, 0.0)
    staged = plan.search_configuration({LLM: two}, 2, 8, 1, dp=[1], stage_link=slow)
    assert staged.specs[LLM].pp == 2 and staged.iteration_time == 4.0 + 2 * 0.5 + 7 * 2.0
    # A frozen encoder receives no gradients.
    frozen = plan.SearchModule({(1, 1): one}, {(1, 1): 0 * one}, *(one for _ in range(5)))
    beside = plan.search_configuration({"vision": frozen, LLM: two}, 3, 8, 1, dp=[1], stage_link=slow)
    assert beside.iteration_time == 1.0 + 0.5 + staged.iteration_time


def test_proportional_allocation_is_never_better():
    rng = np.random.default_rng(5)
    modules = {"vision": module(rng, 6, frozen=True), LLM: module(rng, 8)}
    free = plan.search_configuration(modules, 8, 16, 1)
    proportional = plan.search_configuration(modules, 8, 16, 1, allocation="proportional")
    assert free.iteration_time <= proportional.iteration_time


def test_more_gpus_and_faster_links_never_hurt():
    rng = np.random.default_rng(7)
    modules = {"vision": module(rng, 9), "audio": module(rng, 7, frozen=True), LLM: module(rng, 16)}
    times = [plan.search_configuration(modules, gpus, 32, 1).iteration_time for gpus in (3, 6, 12, 24, 48)]
    assert times == sorted(times, reverse=True)
    slow = plan.LinkModel(0.1, 0.1)
    linked = plan.search_configuration(modules, 24, 32, 1, stage_link=slow, data_link=slow)
    assert linked.iteration_time >= times[3]
    again = plan.search_configuration(modules, 24, 32, 1, stage_link=slow, data_link=slow)
    assert again.layout == linked.layout and again.specs == linked.specs


@pytest.mark.parametrize(("stages", "downstream"), [(1, 0), (4, 0), (1, 1), (3, 4)])
@pytest.mark.parametrize("microbatches", [1, 3, 20])
def test_in_flight_counts_are_those_of_1f1b(stages, downstream, microbatches):
    """1F1B as a table of times: d stages before the end, forward k is at 2 k - d and backward k at 2 k + d + 1."""
    counts = []
    for distance in range(stages - 1 + downstream, downstream - 1, -1):
        forwards = [2 * k - distance for k in range(microbatches)]
        backwards = [2 * k + distance + 1 for k in range(microbatches)]
        counts.append(max(sum(f <= now <= b for f, b in zip(forwards, backwards)) for now in forwards))
    assert in_flight(stages, downstream, microbatches).tolist() == counts


def test_bad_input_is_named():
    rng = np.random.default_rng(0)
    good = module(rng, 3)
    with pytest.raises(ValueError, match="no module 'language_model'"):
        plan.search_configuration({"vision": good}, 4, 8, 2)
    with pytest.raises(ValueError, match="multiple of microbatch"):
        plan.search_configuration({LLM: good}, 4, 8, 3)
    with pytest.raises(ValueError, match="unknown allocation 'even'"):
        plan.search_configuration({LLM: good}, 4, 8, 2, allocation="even")
    with pytest.raises(ValueError, match="unknown placement 'replicated'"):
        plan.search_configuration({LLM: good}, 4, 8, 2, placements=["replicated"])
    with pytest.raises(ValueError, match="tensor_link has latency nan"):
        plan.search_configuration({LLM: good}, 4, 8, 2, tensor_link=plan.LinkModel(math.nan))
    with pytest.raises(ValueError, match="gpu_memory must be positive, got nan"):
        plan.search_configuration({LLM: good}, 4, 8, 2, gpu_memory=math.nan)
    for name in (*BYTES, "tensor_reduces"):
        bad = {key: getattr(good, key) for key in ("forward", "backward", *BYTES)} | {name: np.array([1, math.nan, 1])}
        with pytest.raises(ValueError, match=rf"language_model: {name}\[1\] is nan"):
            plan.search_configuration({LLM: plan.SearchModule(**bad)}, 4, 8, 2)
    good.forward[1, 2][2] = -1.0
    with pytest.raises(ValueError, match=r"language_model: forward\[1, 2\]\[2\] is -1"):
        plan.search_configuration({LLM: good}, 4, 8, 2)
    with pytest.raises(ValueError, match="the same"):
        plan.search_configuration({LLM: plan.SearchModule({(1, 1): np.ones(1)}, {}, *(np.ones(1),) * 5)}, 4, 8, 2)
    with pytest.raises(ValueError, match="the seconds of all layers overflow"):
        huge = plan.SearchModule({(1, 1): np.array([1e308])}, {(1, 1): np.array([1e308])}, *(np.ones(1),) * 5)
        plan.search_configuration({LLM: huge}, 4, 8, 2)
    with pytest.raises(ValueError, match="no configuration fits"):
        plan.search_configuration({LLM: module(rng, 3)}, 4, 8, 2, dp=np.zeros(0, int))
    with pytest.raises(ValueError, match=r"stages in all, more than 2\^26: merge layers, or give fewer"):
        deep = {(1, 1): np.ones(6000)}
        plan.search_configuration({LLM: plan.SearchModule(deep, deep, *(np.ones(6000),) * 5)}, 10_000, 8, 2)
    with pytest.raises(ValueError, match="both positive"):
        wrong = {(0, 1): np.ones(1)}
        plan.search_configuration({LLM: plan.SearchModule(wrong, wrong, *(np.ones(1),) * 5)}, 4, 8, 2)
