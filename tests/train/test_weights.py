"""Random weights depend only on the seed and the name, for any rank and any layout."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from interlace.data import ByteTokenizer
from interlace.model import MultimodalModel
from interlace.run import parallelize
from interlace.run.execute import memory
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config.load import ConfigError
from interlace.train.data.feed import datasets
from interlace.train.models.build import build, build_layout, initialize, materialize
from interlace.train.models.random_weights import random_values
from tests.model import wholes
from tests.train.build import _build, _config
from tests.train.weights import OfOneRank

HEADS = [f"model.language_model.config.num_{kind}_heads=4" for kind in ("attention", "key_value")]
MODELS = [
    HEADS,
    [
        *HEADS,
        "model.language_model.architecture=Qwen2ForCausalLM",
        "model.language_model.config.tie_word_embeddings=true",
    ],
    [*HEADS, "model.vision.architecture=CLIPVisionModel", "model.vision.projector=linear", "model.vision.freeze=true"],
]


def random_parallel(rng: random.Random) -> str:
    def spec(*tp: int) -> str:
        return f"{{tp={rng.choice(tp)}, pp={rng.randint(1, 2)}, dp={rng.randint(1, 2)}}}"

    specs = f"vision={spec(1, 2)}, audio={spec(1, 2)}, language_model={spec(1, 2, 4)}"
    return f"parallel={{placement='parallel', {specs}}}"


@pytest.mark.parametrize(
    "overrides", [pytest.param(each, marks=[pytest.mark.slow] * (each != MODELS[-1])) for each in MODELS]
)
def test_what_each_rank_holds_is_its_part_of_the_same_weights(overrides: list[str]) -> None:
    whole = materialize(_build(*overrides), seed=3)
    assert not any(tensor.is_meta for tensor in [*whole.parameters(), *whole.buffers()])
    weights, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    matrices = [name for name, weight in weights.items() if weight.dim() > 1 and weight.requires_grad]
    for name in matrices:  # no two layers have equal values
        twin = weights.get(name.replace(".0.", ".1."))
        assert twin is None or twin is weights[name] or not torch.equal(weights[name], twin), name
    other = dict(materialize(_build(*overrides), seed=4).named_parameters())
    assert not any(torch.equal(weights[name], other[name]) for name in matrices)

    rng = random.Random(len(overrides))
    for parallel in ("parallel={ranks=1}", *(random_parallel(rng) for _ in range(2))):
        plans = _config(*overrides, parallel, "train.batch_size=64")
        first = canonical_names(_build(*overrides))
        seen: dict[str, torch.Tensor] = {}
        world = build_layout(plans, _build(*overrides)).world
        for rank in range(world):
            model = build(plans, ByteTokenizer())
            held = OfOneRank(model, build_layout(plans, model), rank)
            assert all(bool(parameter.isnan().all()) for _, parameter in held.named_parameters())
            initialize(held, seed=3)
            regions, mine = held.regions(), dict(held.named_parameters())
            for name, parameter in mine.items():
                expected = weights[first[name]]
                assert parameter.requires_grad == expected.requires_grad
                expected = regions[name].piece(expected) if name in regions else expected
                assert torch.equal(parameter, expected), (parallel, rank, name)
                times = seen.setdefault(first[name], torch.zeros(weights[first[name]].shape))
                for part in [box.of(times) for box in regions[name].boxes] if name in regions else [times]:
                    part += 1
            for stage in held.rank.stages.values():
                for name, buffer in stage.named_buffers():
                    assert torch.equal(buffer, buffers[name]), name
            # Memory has only the rank's own weights, whole or in pieces.
            here = {first[name] for name in mine if name not in regions}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                assert parameter.is_meta == (first[name] not in here), (rank, name)
        assert seen.keys() == weights.keys() and all(bool((times >= 1).all()) for times in seen.values())


def test_what_is_not_filled_is_seen() -> None:
    model = _build()
    memory.allocate(model, [name for name, _ in model.named_parameters()], "cpu")
    memory.allocate_buffers(model, "cpu")
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    assert all(bool((~b.isfinite() | (b == torch.iinfo(torch.int64).max)).all()) for b in model.buffers())


def test_meta_model_is_initialized_and_matches_the_whole() -> None:
    """By all ranks of a process; each stage has its own buffers."""
    whole = materialize(_build(*HEADS), seed=5)
    samples = [datasets(_config(*HEADS), whole, ByteTokenizer())[0].sample(i, 0) for i in range(3)]
    expected = whole(**whole.collate(samples)).loss.item()
    config = _config(
        *HEADS, "parallel={placement='parallel', vision={tp=2}, audio={pp=2}, language_model={tp=2, pp=2}}"
    )
    model = _build(*HEADS)
    parallel = parallelize(model, build_layout(config, model), transport="local", device="cpu", timeout=60)
    initialize(parallel, seed=5)
    assert parallel.evaluate(samples).loss == pytest.approx(expected, rel=1e-5)
    assert parallel.step(samples).loss == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="weights on cpu, but device is meta: move it with"):
        parallelize(model, build_layout(config, model), transport="local", device="meta")
    with pytest.raises(ConfigError, match=r"no initialisation rule for language_model\.other"):
        next(random_values(model, ["language_model.other"], 0))


FIRST = ("llava_next", "qwen2_audio")  # a weight beside the tower, and sinusoids


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in wholes.CASES]
)
def test_the_first_values_of_whole_models_are_huggingfaces(name: str) -> None:
    """Buffers are in no folder: they must start with HuggingFace's values."""
    own = wholes.CASES[name].make()
    with torch.device("meta"):
        model = MultimodalModel.of_whole(type(own)(copy.deepcopy(own.config)))
    names = [parameter for parameter, _ in model.named_parameters()]
    read = dict(random_values(model, [], 0, read=names))
    buffers = {model.name_in_whole(each): values for each, values in read.items()}
    for key, expected in own.named_buffers():
        assert torch.equal(buffers[key], expected), key
    drawn = dict(random_values(model, names, 0))
    assert drawn.keys() >= set(names) and all(bool(drawn[each].isfinite().all()) for each in names)
    assert all(torch.equal(drawn[each], values) for each, values in read.items())
