"""plan.search_configuration against every configuration, and its in-flight counts against the stage graph."""

import itertools
import math

import numpy as np
import pytest

from interlace import plan
from interlace.schedule import StageGraph

DEGREES = [(1, 1), (2, 1), (1, 2)]


def module(rng, layers, frozen=False):
    base = rng.integers(1, 9, layers).astype(float)
    forward = {(tp, cp): base / (tp * cp) ** 0.75 for tp, cp in DEGREES}
    backward = {key: row * (0 if frozen else 2) for key, row in forward.items()}
    size = lambda: rng.integers(0, 9, layers).astype(float)  # noqa: E731
    return plan.SearchModule(forward, backward, size(), size() * (not frozen), size(), size() + 3, size() / 8)


def iteration_time(chosen, placement, modules, dp, count, memory, stage, data):
    """Eq. 4.2 with all terms, in plain loops; infinite if the memory is not kept."""
    fills, slowest, syncs, reshard = [], 0.0, [], 0.0
    last = chosen["language_model"]
    *names, _ = chosen
    groups = [[n] for n in names] if placement == "parallel" else [names] if names else []
    entry = modules["language_model"].input_bytes[0] / (last[0] * last[1])
    for group in [*groups, ["language_model"]]:
        tp, cp, pp, again = chosen[group[0]]
        stages = [[0.0, 0.0, 0.0, 0.0] for _ in range(pp)]  # seconds, bytes, gradients, moved
        for name in group:
            m = modules[name]
            f, b = m.forward[tp, cp], m.backward[tp, cp]
            times = f + b + (f * (b > 0) if again else 0)
            cuts = plan.partition(times, pp)
            for s in range(pp):
                here = slice(cuts[s], cuts[s + 1])
                flight = min(count, pp - s + (0 if name == "language_model" else last[2]))
                held = ((m.input_bytes if again else m.activation_bytes) * (b > 0))[here].sum() / (tp * cp) * flight
                fixed = (m.weight_bytes + m.gradient_bytes + m.optimizer_bytes / (dp * cp))[here].sum() / tp
                stages[s][0] += times[here].sum()
                stages[s][1] += held + fixed
                stages[s][2] += m.gradient_bytes[here].sum() / tp
                stages[s][3] += m.input_bytes[cuts[s]] / (tp * cp)
        if max(s[1] for s in stages) > memory:
            return math.inf
        fill = sum(s[0] for s in stages) + 2 * sum(stage.transfer(s[3]) for s in stages[1:])
        syncs.append(data.all_reduce(max(s[2] for s in stages), dp * cp))
        slowest = max(slowest, *(s[0] for s in stages))
        if group == ["language_model"]:
            total = fill
        else:
            fills.append(fill + 2 * stage.transfer(entry))
            reshard += 2 * stage.transfer(entry) * ((tp, cp) != last[:2])
    return total + max(fills, default=0.0) + (count - 1) * slowest + count * reshard + max(syncs)


def every_configuration(modules, gpus, batch, microbatch, memory, stage, data):
    best = math.inf
    layers = {name: len(m.weight_bytes) for name, m in modules.items()}
    for dp in range(1, gpus + 1):
        if batch % (dp * microbatch):
            continue
        budget, count = gpus // dp, batch // (dp * microbatch)
        each = {
            name: [
                (tp, cp, pp, again)
                for tp, cp in DEGREES
                for pp in range(1, layers[name] + 1)
                for again in (False, True)
                if tp * cp * pp <= budget
            ]
            for name in modules
        }
        for options in itertools.product(*each.values()):
            chosen = dict(zip(modules, options, strict=True))
            used = [tp * cp * pp for tp, cp, pp, _ in options]
            if sum(used) <= budget:
                best = min(best, iteration_time(chosen, "parallel", modules, dp, count, memory, stage, data))
            if len(options) > 2 and len(set(options[:-1])) == 1 and used[0] + used[-1] <= budget:
                best = min(best, iteration_time(chosen, "colocated", modules, dp, count, memory, stage, data))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_search_finds_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    modules = {f"encoder{i}": module(rng, 3, frozen=bool(i)) for i in range(seed % 3)}
    modules["language_model"] = module(rng, 4)
    stage, data = plan.LinkModel(0.01, 0.1), plan.LinkModel(0.02, 0.05)
    memory = [math.inf, 60.0, 35.0, 45.0][seed % 4]
    gpus = 4 if seed % 3 == 2 else 6
    best = every_configuration(modules, gpus, 8, 2, memory, stage, data)
    arguments = dict(gpu_memory=memory, stage_link=stage, data_link=data)
    if best == math.inf:
        with pytest.raises(ValueError, match="no configuration fits"):
            plan.search_configuration(modules, gpus, 8, 2, **arguments)
        return
    found = plan.search_configuration(modules, gpus, 8, 2, **arguments)
    assert found.iteration_time == pytest.approx(best, rel=1e-12)
    assert found.throughput == pytest.approx(8 / best)
    assert found.plan.world_size <= gpus and max(found.peak_bytes.values()) <= memory
    for name, spec in found.specs.items():
        mine = [s for s in found.plan.stages if s.module == name]
        assert [s.start for s in mine[1:]] == [s.stop for s in mine[:-1]] and len(mine) == spec.pp
        assert all(len(s.ranks) == spec.tp * spec.cp for s in mine)


def test_proportional_allocation_is_never_better():
    rng = np.random.default_rng(5)
    modules = {"vision": module(rng, 6, frozen=True), "language_model": module(rng, 8)}
    free = plan.search_configuration(modules, 8, 16, 1)
    proportional = plan.search_configuration(modules, 8, 16, 1, allocation="proportional")
    assert free.iteration_time <= proportional.iteration_time


@pytest.mark.parametrize("encoder", [1, 3])
@pytest.mark.parametrize("backbone", [1, 4])
def test_in_flight_counts_are_those_of_the_stage_graph(encoder, backbone):
    graph = StageGraph.build(
        {"vision": range(encoder), "language_model": range(encoder, encoder + backbone)}, [("vision", "language_model")]
    )
    caps = [graph.in_flight_caps[s, s] for s in range(encoder + backbone)]
    expected = [*plan.in_flight(encoder, backbone, 99), *plan.in_flight(backbone, 0, 99)]
    assert caps == expected
    assert plan.in_flight(4, 2, 3).tolist() == [3, 3, 3, 3]


def test_bad_input_is_named():
    rng = np.random.default_rng(0)
    good = module(rng, 3)
    with pytest.raises(ValueError, match="no module 'language_model'"):
        plan.search_configuration({"vision": good}, 4, 8, 2)
    with pytest.raises(ValueError, match="multiple of microbatch"):
        plan.search_configuration({"language_model": good}, 4, 8, 3)
    good.weight_bytes[1] = math.nan
    with pytest.raises(ValueError, match=r"language_model: weight_bytes\[1\] is nan"):
        plan.search_configuration({"language_model": good}, 4, 8, 2)
