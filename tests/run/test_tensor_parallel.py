"""Tensor parallelism inside the lanes of a pipeline: loss, gradients and norm are those of one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import Checkpointing, MultimodalModel
from interlace.run import ParallelModel, PipelineError, parallelize
from tests.distributed.workers import run_ranks
from tests.model import zoo
from tests.run.random_cases import kinds, random_checkpointing, random_samples, sweep
from tests.run.test_parity import FREEZING, assert_same_gradient, oracle
from tests.tiny import random_microbatches, random_sample, tiny_mllm

LLM = "language_model"
PLACEMENTS = ("parallel", "colocated", "shared", "replicated", "custom")
SEEDS = 5
DRAWN = {  # kinds of cases that every sweep has to meet; see `random_cases.sweep`
    *PLACEMENTS,
    *(f"{freezing} frozen" for freezing in FREEZING),
    *(f"checkpointing={checkpointing}" for checkpointing in get_args(Checkpointing)),
    *("tied=True", "tied=False", "schedule=1f1b", "schedule=gpipe"),
    *("equal lanes", "lanes that divide", "lanes that do not divide"),
}
DUE = DRAWN | {"copies", "crossing lanes"}
DUE |= {f"{side} {degree}" for side in ("encoder", "language") for degree in ("tp2", "tp3", "pp2", "dp2")}


def model(**options: Any) -> MultimodalModel:
    """Heads and features that divide among 2 and among 3 ranks."""
    return tiny_mllm(**{"hidden": 24, "heads": 6, "kv_heads": 6, **options})


def random_specs(rng: random.Random, placement: str, names: list[str], layers: int) -> dict[str, ParallelSpec]:
    def spec(**fixed: int) -> ParallelSpec:
        drawn = {"tp": rng.choice([1, 2, 2, 3]), "pp": rng.randint(1, layers), "dp": rng.choice([1, 1, 2])}
        return ParallelSpec(**{**drawn, **fixed})

    if placement == "shared":  # all modules on the same ranks
        world = rng.choice([2, 4, 6])
        ways = [
            ParallelSpec(tp=tp, pp=pp, dp=world // tp // pp)
            for tp in (1, 2, 3)
            for pp in range(1, layers + 1)
            if world % (tp * pp) == 0
        ]
        specs = {name: rng.choice(ways) for name in names}
        specs[LLM] = rng.choice([way for way in ways if way.tp > 1])
        return specs
    if placement == "colocated":
        merged = spec()
        return {**dict.fromkeys(names[:-1], merged), LLM: spec(tp=rng.choice([2, 3]))}
    return {name: spec(tp=rng.choice([2, 3])) if name == names[-1] else spec() for name in names}


def copied(rng: random.Random, mllm: MultimodalModel) -> Layout:
    """Encoders once per stage of the language model, on its lanes ("replicated", which has no constructor for tp)."""
    tp, pp = rng.choice([2, 3]), rng.randint(1, 2)
    lanes = [Lane(tuple(range(i * tp, (i + 1) * tp))) for i in range(pp)]
    modules = {}
    for name in mllm.modules_order():
        layers = len(mllm.layer_list(name))
        if name == LLM:
            cuts = [0, 1, layers] if pp == 2 else [0, layers]
            stages = tuple(Stage(name, i, cuts[i], cuts[i + 1], lane) for i, lane in enumerate(lanes))
        else:
            stages = (Stage(name, 0, 0, layers, lanes[0], tuple(lanes[1:])),)
        modules[name] = ParallelSpec(tp=tp, pp=len(stages)), (Pipeline(name, 0, stages),)
    return Layout(modules, tp * pp)


def crossing(rng: random.Random, mllm: MultimodalModel) -> Layout:
    """Lanes of different sizes that share ranks in any way: an encoder's stages overlap the language model's."""
    world, modules = 4, {}
    for name in mllm.modules_order():
        layers = len(mllm.layer_list(name))
        tp, pp = rng.choice([1, 2, 3]), rng.randint(1, 2)
        cuts = [0, 1, layers] if pp == 2 else [0, layers]
        lanes = [Lane(tuple(sorted(rng.sample(range(world), tp)))) for _ in range(pp)]
        stages = tuple(Stage(name, i, cuts[i], cuts[i + 1], lane) for i, lane in enumerate(lanes))
        modules[name] = ParallelSpec(tp=tp, pp=pp), (Pipeline(name, 0, stages),)
    used = sorted({r for _, ps in modules.values() for p in ps for s in p.stages for r in s.lane.ranks})
    new = {rank: i for i, rank in enumerate(used)}
    modules = {
        name: (
            spec,
            tuple(
                Pipeline(
                    name,
                    p.replica,
                    tuple(
                        Stage(name, s.index, s.start, s.stop, Lane(tuple(new[r] for r in s.lane.ranks)))
                        for s in p.stages
                    ),
                )
                for p in ps
            ),
        )
        for name, (spec, ps) in modules.items()
    }
    return Layout(modules, len(used))


def random_layout(rng: random.Random, mllm: MultimodalModel, placement: str) -> Layout:
    if placement == "replicated":
        return copied(rng, mllm)
    if placement == "custom":
        return crossing(rng, mllm)
    names = mllm.modules_order()
    specs = random_specs(rng, placement, names, len(mllm.layer_list(LLM)))
    return Layout.from_specs(mllm, specs, placement=placement)


def norm_of(gradients: dict[str, torch.Tensor | None], mllm: MultimodalModel) -> float:
    """Of the parameters of the model, each once."""
    found = [gradients[name] for name, _ in mllm.named_parameters()]
    return sum(float(g.double().square().sum()) for g in found if g is not None) ** 0.5


def compare_holders(parallel: ParallelModel) -> None:
    """From now on a step fails after which ranks have other bits of a gradient that they share: they would drift."""
    pieces, names = parallel._pieces, {id(p): name for name, p in parallel.mllm.named_parameters()}
    collect = pieces.collect

    def compare() -> None:
        first: dict[tuple[int, int], torch.Tensor | None] = {}
        for own, place, parameter, cut in pieces._held:
            other = first.setdefault((id(own), -1 if cut is None else place), parameter.grad)
            same = other is parameter.grad or (
                other is not None and parameter.grad is not None and torch.equal(other, parameter.grad)
            )
            assert same, f"the ranks have different gradients of {names[id(own)]}"
        collect()

    pieces.collect = compare  # type: ignore[method-assign]


def random_model(rng: random.Random, encoders: Sequence[tuple[str, ...]]) -> tuple[MultimodalModel, list[str]]:
    """A model with one of `encoders`, some of it frozen; and of what kinds it is."""
    names = rng.choice(encoders)
    tied = rng.random() < 0.5
    mllm = model(tied=tied, encoders=names)
    freezing = rng.choice(["nothing", "nothing", *FREEZING])
    for path in FREEZING[freezing]:
        if path.split(".")[0] in (*names, LLM):
            mllm.freeze(path)
    mllm.train()
    return mllm, [f"tied={tied}", f"{freezing} frozen"]


def accepted(
    draw: Callable[[], Layout], fits: Callable[[Layout], bool], mllm: MultimodalModel, transport: str, options: Any
) -> ParallelModel:
    """`mllm` in the first layout drawn that fits and that it runs in."""
    while True:
        layout = draw()
        if not fits(layout):
            continue
        try:
            return parallelize(mllm, layout, transport=transport, timeout=30, **options)
        except ValueError as error:  # a tied weight on lanes that overlap
            if "share some of their ranks" not in str(error):
                raise


def check_case(
    seed: int, transport: str = "local", worlds: range = range(1, 13), *, sequence_parallel: bool = False
) -> set[str]:
    """One layout, one model, two steps; returns of what kinds they are."""
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    mllm, what = random_model(rng, [("vision", "audio"), ("vision",), ("vision", "audio")])
    samples = random_samples(rng, mllm, rng.randint(2, 6))
    options = {"checkpointing": random_checkpointing(rng), "schedule": rng.choice(["1f1b", "1f1b", "gpipe"])}
    options["sequence_parallel"] = sequence_parallel
    parallel = accepted(
        lambda: random_layout(rng, mllm, placement), lambda layout: layout.world in worlds, mllm, transport, options
    )
    layout = parallel.layout
    where = f"seed {seed}: {placement}, {what}, {options}\n{layout.describe()}\n"
    loss, gradients = oracle(mllm, [samples])
    norm = norm_of(gradients, mllm)
    mllm.zero_grad()
    compare_holders(parallel)
    for times in (1, 2):
        result = parallel.step(samples, microbatches=rng.choice([1, 2, 3]))
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), f"{where}loss {result.loss}, not {loss}"
        found = parallel.full_gradients()
        for name, expected in gradients.items():
            if name in found:
                try:
                    assert_gradient(name, found[name], None if expected is None else times * expected, norm)
                except AssertionError as error:
                    raise AssertionError(f"{where}step {times}: {error}") from None
        told = parallel.clip_grad_norm_(1e9)
        assert abs(told - times * norm) <= 1e-6 * times * norm + 1e-9, f"{where}norm {told}, not {times * norm}"
    assert parallel.evaluate(samples).loss == pytest.approx(loss, rel=1e-5)
    return {placement, *what, *(f"{name}={value}" for name, value in options.items())} | kinds(layout)


def assert_gradient(name: str, found: torch.Tensor | None, expected: torch.Tensor | None, norm: float) -> None:
    """A gradient that is nothing but rounding, as that of a bias before a softmax, is held against the whole norm."""
    if found is not None and expected is not None and float((found - expected).norm()) <= 1e-7 * norm:
        return
    assert_same_gradient(name, found, expected)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layouts_equal_one_process(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_equal_one_process() -> None:
    sweep(check_case, range(SEEDS, SEEDS + 51), DUE)


def encoder_and_model(mllm: MultimodalModel, encoder: int, language: int, **more: int) -> Layout:
    """Lanes of so many ranks for vision and for the language model."""
    specs = {"vision": ParallelSpec(tp=encoder), LLM: ParallelSpec(tp=language, **more)}
    return Layout.from_specs(mllm, specs)


@pytest.mark.parametrize(
    ("encoder", "language"),
    [(3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (2, 1), (2, 3)))],
)
def test_lanes_that_do_not_divide_and_fewer_rows_than_ranks(encoder: int, language: int) -> None:
    """Chunks of 1, 2, 3, ... rows of an image's features: parts of all sizes, empty ones too."""
    mllm = model(encoders=("vision",))
    generator = torch.Generator().manual_seed(encoder)
    batch = [[random_sample(mllm, generator, images=1, text=2)] for _ in range(6)]
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, encoder, language, pp=2), timeout=30)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))


def test_a_batch_of_text_leaves_the_encoders_untouched() -> None:
    mllm = model()
    batch = random_microbatches(mllm, "text")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(tp=2), "audio": ParallelSpec(tp=2), LLM: ParallelSpec(tp=3)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs), timeout=30)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
        assert parameter.grad is None or name.startswith(LLM)


def test_an_optimizer_over_the_model_trains_it_as_one_process_would() -> None:
    mllm, alone = (model(tied=True, encoders=("vision",)) for _ in range(2))
    batch = random_microbatches(mllm, "all")
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2, dp=1), timeout=30)
    assert {id(p) for _, p in parallel.named_parameters()} == {id(p) for p in mllm.parameters()}
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (mllm, alone))
    for _ in range(3):
        loss, _ = oracle(alone, batch)
        theirs.step()
        assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-4)
        ours.step()
        ours.zero_grad()
    for (name, mine), other in zip(mllm.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5), name
        mine.data = torch.randn_like(mine) * 0.1  # weights that are replaced are followed
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))


def test_a_failed_step_leaves_the_next_one_whole_and_the_model_as_it_was() -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 3), timeout=30)

    broken = parallel.stages[3][LLM, 0].register_forward_pre_hook(no_memory)
    with pytest.raises(PipelineError, match=r"rank 3, FORWARD language_model\[0\] chunk \d+: OSError: no memory"):
        parallel.step(batch)
    broken.remove()
    parallel.zero_grad()
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert oracle(mllm, batch)[0] == pytest.approx(loss, rel=1e-6)


def test_norms_within_heads_are_summed_over_the_lane_and_only_there() -> None:
    """Qwen3's, in a CLIP encoder's company; the model that was given is as it was for who uses it alone."""

    def qwen3(**changes: Any) -> Qwen3ForCausalLM:
        sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
        return Qwen3ForCausalLM(Qwen3Config(**{**zoo.COMMON, **sizes, "vocab_size": zoo.VOCAB, **changes}))

    mllm = zoo.build(vision=zoo.clip, audio=None, language=qwen3)
    generator = torch.Generator().manual_seed(0)
    batch = [[zoo.sample(mllm, generator, 3, ("vision", 8, 12), 4), zoo.sample(mllm, generator, 6)]]
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2, pp=2), timeout=30)
    assert parallel.step(batch[0], microbatches=2).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert "language_model.model.layers.0.self_attn.q_norm.weight" in gradients
    assert not any(parameter._backward_hooks for parameter in mllm.parameters())
    assert oracle(mllm, batch)[0] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole rows"])
def test_autocast_inside_lanes(sequence_parallel: bool) -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    layout = encoder_and_model(mllm, 3, 2)
    options = {"checkpointing": "full", "sequence_parallel": sequence_parallel}
    parallel = parallelize(mllm, layout, autocast=torch.bfloat16, timeout=30, **options)
    result = parallel.step(batch)
    assert result != loss and abs(result - loss) <= 2e-2 * loss  # bf16 has 8 bits of mantissa
    for name, parameter in mllm.named_parameters():
        if gradients[name].norm() > 1e-3:
            assert parameter.grad.dtype is torch.float32
            assert (parameter.grad - gradients[name]).norm() <= 0.15 * gradients[name].norm(), name


def test_what_cannot_be_cut_is_refused_and_says_what_to_choose() -> None:
    mllm = tiny_mllm(encoders=("vision",))
    with pytest.raises(
        ValueError,
        match=r"language_model cannot be cut among tp = 2 ranks: .*k_proj has 1 heads.* leave language_model at tp = 1",
    ):
        parallelize(mllm, encoder_and_model(mllm, 1, 2))
    with pytest.raises(ValueError, match=r"vision cannot be cut among tp = 3 ranks: .*q_proj has 2 heads"):
        parallelize(mllm, encoder_and_model(mllm, 3, 1))
    unknown = model(encoders=("vision",))
    unknown.language_model.model.layers[1].self_attn.out = unknown.language_model.model.layers[1].self_attn.o_proj
    del unknown.language_model.model.layers[1].self_attn.o_proj
    with pytest.raises(ValueError, match=r"among tp = 2 ranks: how is not known of language_model.model.layers.1.self"):
        parallelize(unknown, encoder_and_model(unknown, 1, 2))


def test_lanes_that_this_version_does_not_run_are_refused() -> None:
    mllm = model(encoders=())
    stage = Stage(LLM, 0, 0, 2, Lane((1, 0)))
    layout = Layout({LLM: (ParallelSpec(tp=2), (Pipeline(LLM, 0, (stage,)),))}, 2)
    with pytest.raises(ValueError, match=r"on ranks 1\+0: name the ranks of a lane in ascending order"):
        parallelize(mllm, layout)
    tied = model(tied=True, encoders=())
    stages = (Stage(LLM, 0, 0, 1, Lane((0, 1))), Stage(LLM, 1, 1, 2, Lane((1, 2))))
    layout = Layout({LLM: (ParallelSpec(tp=2, pp=2), (Pipeline(LLM, 0, stages),))}, 3)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on lanes that share some of their ranks \(0\+1 and"):
        parallelize(tied, layout)


# ---------------------------------------------------------------------- between processes


def distributed(rank: int, seeds: list[int]) -> int:
    return sum(bool(check_case(seed, "distributed", range(4, 5))) for seed in seeds)


@pytest.mark.parametrize(
    "seeds", [[102, 104, 105], pytest.param(list(range(106, 116)), marks=pytest.mark.slow)], ids=["three", "ten"]
)
def test_four_processes_equal_one(seeds: list[int]) -> None:
    results = run_ranks(4, distributed, seeds)
    assert results == [("returned", len(seeds))] * 4, results


def pieces(rank: int) -> list[tuple[str, list[int]]]:
    mllm = model(encoders=("vision",))
    whole = {name: parameter.detach().clone() for name, parameter in mllm.named_parameters()}
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2), transport="distributed", timeout=30)
    batch = random_microbatches(mllm, "all")
    before = parallel.step(batch).loss
    with torch.no_grad():
        for _, parameter in parallel.named_parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    assert parallel.evaluate(batch).loss < before
    held = dict(parallel.named_parameters())
    for name, parameter in mllm.named_parameters():
        if name in held and held[name].shape != parameter.shape:  # copied out of the model that was given
            assert torch.equal(parameter, whole[name]), name
        elif name in held:
            assert held[name] is parameter, name
    layout = Layout.from_specs(text := model(encoders=()), {LLM: ParallelSpec(tp=2, dp=2, shard="full")})
    sharded = parallelize(text, layout, transport="distributed", timeout=30, sequence_parallel=False)
    sharded.step(random_microbatches(text, "text"))
    norm = text.language_model.model.norm.weight  # which its lanes have whole
    assert norm.numel() > 1 and norm.untyped_storage().nbytes() == norm.element_size()
    return [(name, list(parameter.shape)) for name, parameter in parallel.named_parameters()]


def test_a_process_has_pieces_under_their_names_in_the_whole_model() -> None:
    whole = {name: list(parameter.shape) for name, parameter in model(encoders=("vision",)).named_parameters()}
    seen: dict[str, int] = {}
    for kind, value in run_ranks(4, pieces):
        assert kind == "returned", value
        for name, shape in value:
            cut = [a // b for a, b in zip(whole[name], shape, strict=True)]
            assert max(cut) <= 2 and cut.count(2) <= 1
            seen[name] = seen.get(name, 0) + 1
    assert seen == dict.fromkeys(whole, 2)


def fail(rank: int) -> str:
    mllm = model(encoders=())
    parallel = parallelize(
        mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), transport="distributed", timeout=20
    )
    if rank == 1:
        parallel.stages[1][LLM, 0].language_model.model.layers[1].register_forward_pre_hook(no_memory)
    try:
        parallel.step(random_microbatches(mllm, "text"))
    except PipelineError as error:
        return str(error)
    return "no error"


def no_memory(*_: Any) -> None:
    raise OSError("no memory")


def test_a_rank_that_fails_in_its_lane_is_named_at_once() -> None:
    (_, other), (_, failed) = run_ranks(2, fail)
    assert failed == "rank 1, FORWARD language_model[0] chunk 0: OSError: no memory"
    assert other.startswith("rank 0, FORWARD language_model[0] chunk 0, in the lane of ranks 0, 1: ")
    assert failed in other
