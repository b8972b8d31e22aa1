"""Random layouts of a tiny model, random batches, and random tables that `interlace.run.tables.table` never makes.

Every case follows from its seed alone. The oracle is one process (`test_parity.oracle`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import Checkpointing, MultimodalModel, Sample
from interlace.run import ParallelModel, parallelize
from interlace.schedule import Chunk, Edge, Schedule, StepTable
from tests.run.parity import oracle
from tests.tiny import random_sample, tiny_mllm

LANGUAGE = "language_model"
PLACEMENTS = ("parallel", "colocated", "shared", "replicated", "chain", "custom", "custom")


@dataclass
class Case:
    """A model that runs in a layout. text: description of the case for failure messages."""

    mllm: MultimodalModel
    parallel: ParallelModel
    text: str


def random_layout(rng: random.Random, mllm: MultimodalModel) -> Layout:
    """A layout of any placement. "custom": any stages on any ranks, merged, shared or copied, each replica split
    differently.
    """
    names = mllm.modules_order()
    placement = rng.choice(PLACEMENTS)
    layers = {name: len(mllm.layer_list(name)) for name in names}
    dp, pp = ({name: rng.randint(1, 3) for name in names} for _ in range(2))
    if placement == "custom":
        return _custom(rng, layers)
    if placement == "chain":
        return Layout.balanced(mllm, rng.randint(1, min(4, sum(layers.values()))), dp=rng.randint(1, 2))
    if placement == "shared":
        world = rng.choice([1, 2, 3, 4])
        ways = [(d, world // d) for d in range(1, world + 1) if world % d == 0 and world // d <= min(layers.values())]
        chosen = {name: rng.choice(ways) for name in names}
        dp, pp = ({name: chosen[name][i] for name in names} for i in (0, 1))
    elif placement == "replicated":
        dp, pp = dict.fromkeys(names, rng.randint(1, 2)), {**dict.fromkeys(names, 1), LANGUAGE: rng.randint(1, 3)}
    elif placement == "colocated":
        encoders = names[:-1]
        dp |= dict.fromkeys(encoders, rng.randint(1, 3))
        pp |= dict.fromkeys(encoders, rng.randint(1, 3))
    pp = {name: min(pp[name], layers[name]) for name in names}
    specs = {name: ParallelSpec(pp=pp[name], dp=dp[name]) for name in names}
    return Layout.from_specs(mllm, specs, placement=placement)


def _custom(rng: random.Random, layers: dict[str, int]) -> Layout:
    world = rng.randint(1, 5)
    made: dict[str, tuple[ParallelSpec, list[tuple[list[int], list[int], list[int]]]]] = {}
    for name, count in layers.items():
        dp, stages = rng.randint(1, min(3, world)), rng.randint(1, min(3, count))
        homes: list[list[int]] = [[] for _ in range(dp)]
        for place, rank in enumerate(rng.sample(range(world), world)):
            if place < dp or rng.random() < 0.7:
                homes[place % dp].append(rank)
        pipelines = []
        for home in homes:
            cuts = [0, *sorted(rng.sample(range(1, count), stages - 1)), count]
            lanes = [rng.choice(home) for _ in range(stages)]
            copied = stages == 1 and name != LANGUAGE and rng.random() < 0.5
            pipelines.append((cuts, lanes, [rank for rank in home if rank not in lanes] if copied else []))
        made[name] = ParallelSpec(pp=stages, dp=dp), pipelines
    used = sorted({rank for _, ps in made.values() for _, lanes, copies in ps for rank in (*lanes, *copies)})
    new = {rank: Lane((i,)) for i, rank in enumerate(used)}
    modules = {}
    for name, (spec, result) in made.items():
        pipelines = []
        for replica, (cuts, lanes, copies) in enumerate(result):
            stages = [
                Stage(name, i, cuts[i], cuts[i + 1], new[lane], tuple(new[c] for c in copies))
                for i, lane in enumerate(lanes)
            ]
            pipelines.append(Pipeline(name, replica, tuple(stages)))
        modules[name] = spec, tuple(pipelines)
    return Layout(modules, len(used))


def kinds(layout: Layout) -> set[str]:
    """Features of a layout: degrees of encoders and of the language model, and positions of their lanes."""
    result, sizes = set(), {}
    for name, (spec, pipelines) in layout.modules.items():
        side = "language" if name == LANGUAGE else "encoder"
        degrees = {"tp": spec.tp, "cp": spec.cp, "pp": spec.pp, "dp": spec.dp}
        result |= {f"{side} {degree}{count}" for degree, count in degrees.items() if count > 1}
        result |= {f"{side} {spec.shard}"} if spec.shard != "none" else set()
        result |= {"sets of slices"} if spec.shard_ranks else set()
        result |= {"copies"} if any(stage.copies for p in pipelines for stage in p.stages) else set()
        sizes[name] = spec.lane_size
    for name, size in sizes.items():
        less, more = sorted((size, sizes[LANGUAGE]))
        if name != LANGUAGE:
            result.add("equal lanes" if less == more else f"lanes that {'do not ' if more % less else ''}divide")
    ranks = [set(lane.ranks) for lane in layout.lanes()]
    pairs = [(a, b) for a in ranks for b in ranks if a & b and a != b]
    result |= {"overlapping lanes"} if pairs else set()
    result |= {"crossing lanes"} if any(a - b and b - a for a, b in pairs) else set()
    return result


def sweep(check: Callable[[int], Collection[str]], seeds: Iterable[int], due: Collection[str]) -> None:
    """Checks the cases of the seeds and collects the kinds that they cover. Each required kind must occur twice. So a
    change of seeds or draws that loses a kind is noticed.
    """
    result = Counter(kind for seed in seeds for kind in set(check(seed)))
    seldom = sorted(kind for kind in due if result[kind] < 2)
    assert not seldom, f"seldom or never met: {seldom} among {dict(result)}"


def random_checkpointing(rng: random.Random) -> Checkpointing:
    number = rng.random()
    return "full" if number < 0.15 else "selective" if number < 0.3 else "none"


def random_case(rng: random.Random) -> Case:
    """A model, partly frozen, and a layout that runs it."""
    encoders = rng.choice([("vision", "audio"), ("vision", "audio"), ("vision",), ("audio",), ()])
    tied, layers = rng.random() < 0.5, rng.choice([1, 2, 3])
    mllm = tiny_mllm(tied=tied, layers=layers, encoders=encoders)
    paths = [*encoders, *(f"{name}.projector" for name in encoders), LANGUAGE]
    frozen = [path for path in paths if rng.random() < rng.choice([0.0, 0.3, 0.6])]
    for path in frozen:
        mllm.freeze(path)
    mllm.train()
    schedule, checkpointing = rng.choice(["1f1b", "1f1b", "gpipe"]), random_checkpointing(rng)
    layout = random_layout(rng, mllm)
    parallel = parallelize(mllm, layout, schedule=schedule, checkpointing=checkpointing, timeout=30)
    text = f"tied={tied}, layers={layers}, frozen={frozen}, {schedule}, checkpointing={checkpointing}\n{layout}"
    return Case(mllm, parallel, text)


def random_samples(rng: random.Random, mllm: MultimodalModel, count: int) -> list[Sample]:
    """Some samples without images, clips or targets; at least one target in total."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    most = rng.choice([0, 1, 2])
    samples = []
    for _ in range(count):
        images = rng.randint(0, most) if "vision" in mllm.encoders else 0
        clips = rng.randint(0, min(1, most)) if "audio" in mllm.encoders else 0
        samples.append(random_sample(mllm, generator, images=images, clips=clips, text=rng.randint(2, 6)))
    for sample in samples[1:]:
        if rng.random() < 0.15:
            sample.labels.fill_(-100)
    return samples


def random_table(rng: random.Random, parallel: ParallelModel, samples: list[Sample]) -> StepTable:
    """Any samples in any chunk of any replica, chunks in any order, some samples encoded twice."""
    *encoders, language = parallel.mllm.modules_order()
    chunks: list[tuple[str, int, list[int]]] = []
    where: dict[str, list[list[tuple[int, int]]]] = {}  # module -> sample -> (its chunk, first row there)
    for name in (*encoders, language):
        rows = [sum(m.tokens for m in s.media.get(name, ())) for s in samples]
        members = [i for i in range(len(samples)) if name == language or rows[i]]
        if name != language:
            members += [i for i in members if rng.random() < 0.1]
        where[name] = [[] for _ in samples]
        bins: dict[int, list[int]] = {}
        wanted = rng.randint(1, max(1, len(members)))
        for i in rng.sample(members, len(members)):
            bins.setdefault(rng.randrange(wanted), []).append(i)
        for mine in bins.values():
            first = 0
            mine = list(dict.fromkeys(mine))
            for i in mine:
                where[name][i].append((len(chunks), first))
                first += rows[i]
            chunks.append((name, rng.randrange(parallel.layout.spec(name).dp), mine))
    reads = _pieces(rng, parallel, samples, chunks, where)
    used = {piece[0] for pieces in reads.values() for piece in pieces}
    chosen = [i for i, (name, *_) in enumerate(chunks) if name == language or i in used]
    order = rng.sample(chosen, len(chosen))
    place = {old: new for new, old in enumerate(order)}
    made: list[Chunk] = []
    count: dict[tuple[str, int], int] = {}
    for old in order:
        name, replica, mine = chunks[old]
        index = count.get((name, replica), 0)
        count[name, replica] = index + 1
        made.append(Chunk(name, replica, index, np.array(mine, np.int32)))
    edges = []
    for name, pieces in reads.items():
        moved = [(place[source], row, place[reader], to, count) for source, row, reader, to, count in pieces]
        edges.append(Edge(name, language, "embeds", np.array(moved, np.int32).reshape(-1, 5)))
    targets = [
        sum(int((samples[i].labels != -100).sum()) for i in c.samples) if c.module == language else 0 for c in made
    ]
    return StepTable(tuple(made), tuple(edges), np.array(targets, np.int64))


def _pieces(
    rng: random.Random,
    parallel: ParallelModel,
    samples: list[Sample],
    chunks: list[tuple[str, int, list[int]]],
    where: dict[str, list[list[tuple[int, int]]]],
) -> dict[str, list[tuple[int, int, int, int, int]]]:
    """Encoder -> pieces that the chunks of the language model read of it."""
    *encoders, language = parallel.mllm.modules_order()
    result: dict[str, list[tuple[int, int, int, int, int]]] = {name: [] for name in encoders}
    for name, pieces in result.items():
        for reader, (module, _, mine) in enumerate(chunks):
            row = 0
            for i in mine if module == language else ():
                length = sum(m.tokens for m in samples[i].media.get(name, ()))
                cut = rng.randint(0, length) if rng.random() < 0.3 else length  # the rest: another source
                for start, stop in ((0, cut), (cut, length)):
                    if start < stop:
                        source, first = rng.choice(where[name][i])
                        pieces.append((source, first + start, reader, row + start, stop - start))
                row += length
        rng.shuffle(pieces)
    return result


def check_steps(case: Case, steps: list[tuple[Any, dict[str, Any], list[Sample]]]) -> None:
    """Checks steps whose gradients add up. Each step is (input, options, its samples)."""
    mllm, parallel = case.mllm, case.parallel
    total: dict[str, torch.Tensor | None] = {}
    expected = []
    for _, _, samples in steps:
        loss, gradients = oracle(mllm, [samples])
        for name, gradient in gradients.items():
            before = total.get(name)
            total[name] = gradient if before is None else before if gradient is None else before + gradient
        squares = sum(
            float(total[n].double().square().sum()) for n, _ in mllm.named_parameters() if total[n] is not None
        )
        expected.append((loss, squares**0.5, dict(total)))
    mllm.zero_grad()
    _compare_views(parallel)
    for (given, options, _), (loss, norm, sums) in zip(steps, expected, strict=True):
        try:
            result = parallel.step(given, **options)
            assert abs(result.loss - loss) <= 1e-5 * abs(loss), f"loss {result.loss}, not {loss}"
            for name, parameter in mllm.named_parameters():
                found, due = parameter.grad, sums[name]
                assert (found is None) == (due is None), f"{name} has {'no' if found is None else 'a'} gradient"
                if found is not None and due is not None:  # some are only rounding: a bias before a softmax
                    error = float((found - due).norm())
                    assert error <= 1e-5 * float(due.norm()) + 1e-7 * norm + 1e-9, (
                        f"{name}: {error} beside {due.norm()}"
                    )
            told = parallel.clip_grad_norm_(1e9)
            assert abs(told - norm) <= 1e-4 * norm + 1e-9, f"gradient norm {told}, not {norm}"
        except Exception as error:
            raise AssertionError(f"{case.text}\n{type(error).__name__}: {error}") from error


def _compare_views(parallel: ParallelModel) -> None:
    """From now on a step fails if ranks with the same weight have different gradients of it."""
    execute, names = (
        parallel._process.execute,
        {id(parameter): name for name, parameter in parallel.mllm.named_parameters()},
    )

    def compare(schedule: Schedule, *rest: Any) -> None:
        execute(schedule, *rest)
        for own, place, view, _ in parallel._process.pieces._held if schedule.backward else ():
            if place is not None:  # a piece, whose gradient is not that of the whole
                continue
            same = view.grad is None if own.grad is None else view.grad is not None and torch.equal(own.grad, view.grad)
            assert same, f"the ranks have different gradients of {names[id(own)]}"

    parallel._process.execute = compare  # type: ignore[method-assign]


def check_layout(seed: int) -> set[str]:
    """Checks a random layout with one to three batches; returns the kinds that it covers."""
    rng = random.Random(seed)
    case = random_case(rng)
    steps = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        samples = random_samples(rng, case.mllm, rng.randint(1, 7))
        chunks = {n: rng.randint(1, 5) for n in case.mllm.encoders if rng.random() < 0.5}
        if rng.random() < 0.5:
            groups: dict[int, list[Sample]] = {}
            for sample in samples:
                groups.setdefault(rng.randrange(4), []).append(sample)
            steps.append((list(groups.values()), {"chunks": chunks}, samples))
        else:
            steps.append((samples, {"chunks": chunks, "microbatches": rng.choice([None, 1, 2, 3])}, samples))
    check_steps(case, steps)
    given, options, samples = steps[0]
    gradients = [None if p.grad is None else p.grad.clone() for p in case.mllm.parameters()]
    loss = case.parallel.evaluate(given, **options).loss
    with torch.no_grad():
        expected = float(case.mllm(**case.mllm.collate(samples)).loss)
    assert abs(loss - expected) <= 1e-5 * abs(expected), f"{case.text}\nevaluation gives {loss}, not {expected}"
    for parameter, gradient in zip(case.mllm.parameters(), gradients, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient), case.text
    return {case.parallel.layout.placement} | kinds(case.parallel.layout)


def check_spoiled(rng: random.Random, case: Case, samples: list[Sample], table: StepTable) -> str:
    """Asserts that an invalid table is refused before any computation; returns the kind of error."""
    parallel, encoders = case.parallel, case.mllm.modules_order()[:-1]
    chunks, edges = list(table.chunks), list(table.edges)
    ways = ["replica", *(["unread", "gap", "twice"] if any(len(edge.pieces) for edge in edges) else [])]
    way, number = rng.choice(ways), len(chunks)
    if way == "replica":
        chunks.append(Chunk(LANGUAGE, parallel.layout.spec(LANGUAGE).dp, 0, chunks[0].samples))
    elif way == "unread":
        used = next(edge for edge in edges if len(edge.pieces))
        old = chunks[int(used.pieces[0, 0])]
        chunks.append(Chunk(old.module, old.replica, len(table.of(old.module, old.replica)), old.samples))
    else:
        place = next(i for i, edge in enumerate(edges) if len(edge.pieces))
        pieces = edges[place].pieces.copy()
        if way == "gap":
            pieces[:, 3] += 1
        else:
            pieces = np.concatenate([pieces, pieces[:1]])
        edges[place] = Edge(encoders[place], LANGUAGE, "embeds", pieces)
    targets = np.zeros(len(chunks), np.int64)
    targets[:number] = table.targets
    spoiled = StepTable(tuple(chunks), tuple(edges), targets)
    parallel._table = lambda _: spoiled  # type: ignore[method-assign]
    case.mllm.zero_grad()
    try:
        parallel.step(samples)
    except ValueError:
        assert all(p.grad is None for p in case.mllm.parameters()), case.text
    else:
        raise AssertionError(f"{case.text}\na table with {way!r} ran")
    return way


def check_table(seed: int) -> set[str]:
    """Checks that a random layout runs random tables, twice in a row; returns the kinds that they cover."""
    rng = random.Random(seed)
    case = random_case(rng)
    steps = []
    tables = {}
    for place in range(rng.choice([1, 1, 2])):
        samples = random_samples(rng, case.mllm, rng.randint(1, 7))
        tables[place] = random_table(rng, case.parallel, samples)
        steps.append((samples, {"place": (0, 0, place)}, samples))
    if rng.random() < 0.2:
        return {check_spoiled(rng, case, samples, tables[0])}
    case.parallel._table = lambda batch: tables[batch.place[2]]  # type: ignore[method-assign]
    check_steps(case, steps)
    return {"sound", case.parallel.layout.placement} | kinds(case.parallel.layout)
