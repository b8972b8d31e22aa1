"""Projectors over whole items, against loops over patches and against each item alone; also in layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from interlace.layout import Layout, ParallelSpec
from interlace.model import ItemProjector, Media, ModalityModule, MultimodalModel, PixelShuffleProjector, Sample
from interlace.model.projector import make_projector, unit_of
from interlace.run import parallelize
from tests.model.zoo import PATCH, llama, siglip, whisper
from tests.run.parity import oracle

SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4)


class Middle(ItemProjector):
    """A custom projector: the first and the last feature of an item."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def tokens(self, features: int, grid: Any) -> int:
        return 2

    def forward(self, features: torch.Tensor, lengths: Any, grids: Any) -> torch.Tensor:
        return self.linear(torch.cat([item[[0, -1]] for item in features.split(list(lengths))]))


@given(SIZES, st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_pixel_shuffle_joins_the_neighbours_of_each_image(sizes: list[tuple[int, int]], scale: int, seed: int) -> None:
    torch.manual_seed(seed)
    projector = PixelShuffleProjector(5, 7, scale=scale).double()
    grids = [(rows * scale, columns * scale) for rows, columns in sizes]
    images = [torch.randn(rows * columns, 5, dtype=torch.float64) for rows, columns in grids]
    result = projector(torch.cat(images), [len(image) for image in images], grids)
    wanted = []
    for image, (rows, columns) in zip(images, grids, strict=True):
        for top in range(0, rows, scale):
            for left in range(0, columns, scale):
                places = [(top + r) * columns + left + c for r in range(scale) for c in range(scale)]
                wanted.append(torch.cat([image[place] for place in places]))
    joined = projector.norm(torch.stack(wanted))
    torch.testing.assert_close(result, projector.down(nn.functional.gelu(projector.up(joined))))
    assert len(result) == sum(projector.tokens(len(i), g) for i, g in zip(images, grids, strict=True))


def build(projector: Any, config: dict[str, Any] | None = None, *, seed: int = 0) -> MultimodalModel:
    """SigLIP with this projector, Whisper with a Q-Former, Llama."""
    torch.manual_seed(seed)
    encoders = {
        "eyes": ModalityModule(siglip(), projector=projector, projector_config=config),
        "ears": ModalityModule(
            whisper(), projector="qformer", projector_config={"queries": 2, "layers": 1, "heads": 2}
        ),
    }
    model = MultimodalModel(encoders, llama(num_key_value_heads=2), placeholders={"eyes": 46, "ears": 47})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def samples(model: MultimodalModel, seed: int = 0) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for shapes in ([("eyes", (3, 16, 8))], [("ears", (8, 20)), ("eyes", (3, 8, 24)), ("eyes", (3, 8, 8))], []) * 2:
        ids, media = [1, 2], {}
        for name, shape in shapes:
            count = model.encoders[name].tokens(shape)
            media.setdefault(name, []).append(Media(shape, count, torch.randn(shape, generator=g)))
            ids += [{"eyes": 46, "ears": 47}[name]] * count + [3]
        ids += torch.randint(4, 40, (6,), generator=g).tolist()
        made.append(Sample.from_unshifted(torch.tensor(ids), None, media))
    return made


PROJECTORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pixel_shuffle": ("pixel_shuffle", {"scale": 2}),
    "qformer": ("qformer", {"queries": 3, "layers": 2, "heads": 2, "hidden": 12}),
    "own class": (Middle, {}),
}
LAYOUTS: dict[str, dict[str, ParallelSpec]] = {
    "stages": {"eyes": ParallelSpec(pp=3), "ears": ParallelSpec(pp=2), "language_model": ParallelSpec(pp=2)},
    "replicas": {"eyes": ParallelSpec(dp=2), "ears": ParallelSpec(dp=1), "language_model": ParallelSpec(dp=2)},
    "lanes": {"eyes": ParallelSpec(tp=2, pp=2), "ears": ParallelSpec(tp=2), "language_model": ParallelSpec(tp=2)},
    "tokens": {"eyes": ParallelSpec(cp=2), "ears": ParallelSpec(dp=1), "language_model": ParallelSpec(cp=2)},
}


@pytest.mark.parametrize("name", PROJECTORS)
def test_items_in_a_batch_are_what_they_are_alone(name: str) -> None:
    model = build(*PROJECTORS[name])
    encoder = model.encoders["eyes"]
    items = [item for sample in samples(model) for item in sample.media.get("eyes", [])]
    together = encoder(**encoder.collate(items))
    alone = [encoder(**encoder.collate([item])) for item in items]
    assert [len(each) for each in alone] == [item.tokens for item in items]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


OFTEN = {("pixel_shuffle", "lanes"), ("qformer", "stages"), ("qformer", "tokens"), ("own class", "replicas")}
CASES = [
    pytest.param(name, layout, marks=() if (name, layout) in OFTEN else pytest.mark.slow)
    for name in PROJECTORS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layouts_give_the_loss_and_gradients_of_one_process(name: str, layout: str) -> None:
    model = build(*PROJECTORS[name]).train()
    batch = samples(model)
    loss, gradients = oracle(model, [batch])
    model.zero_grad()
    assert all(gradients[key] is not None for key in gradients if "projector" in key)
    parallel = parallelize(model, Layout.from_specs(model, LAYOUTS[layout]), timeout=30)
    result = parallel.step(batch, microbatches=2)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    found, largest = parallel.full_gradients(), max(float(g.norm()) for g in gradients.values() if g is not None)
    for key, expected in gradients.items():
        if expected is None:
            assert found.get(key) is None, key
        else:  # a key bias does not change a softmax: its gradient is rounding noise
            assert (found[key] - expected).norm() <= 1e-5 * expected.norm() + 1e-8 * largest, key


def test_freezing_an_encoder_leaves_its_queries_trainable() -> None:
    model = build("qformer", {"queries": 3, "heads": 2})
    model.freeze("eyes")
    assert model.encoders["eyes"].projector.queries.requires_grad  # type: ignore[union-attr]
    assert not any(p.requires_grad for p in model.encoders["eyes"].module.parameters())


def test_what_cannot_be_joined_is_refused() -> None:
    model = build("pixel_shuffle")
    eyes = model.encoders["eyes"]
    assert (
        eyes.tokens((3, 16, 24)) == 6 and unit_of(eyes.projector) == 2 and model.encoders["ears"].tokens((8, 20)) == 2
    )
    with pytest.raises(ValueError, match=r"2 x 3 patches cannot be joined 2 x 2: resize images so that"):
        eyes.tokens((3, 2 * PATCH, 3 * PATCH))
    with pytest.raises(
        ValueError, match=r"PixelShuffleProjector determines the number of tokens .* put the encoder into"
    ):
        ModalityModule(siglip(), projector="pixel_shuffle").tokens((3, 16, 16))
    deaf = ModalityModule(whisper(), projector="pixel_shuffle")
    deaf.connect(24)
    with pytest.raises(ValueError, match=r"these features are not a grid of patches: use the projector mlp"):
        deaf.tokens((8, 20))
    with pytest.raises(ValueError, match=r"Middle is called with .*unexpected keyword argument 'width'"):
        make_projector(Middle, 4, 4, {"width": 3})


def test_callback_that_drops_features_needs_another_projector() -> None:
    encoder = copy.copy(ModalityModule(siglip(), projector="pixel_shuffle", postprocess=lambda _, x: x[::2]))
    encoder.connect(24)
    image = Media((3, 16, 16), 4, torch.randn(3, 16, 16))
    with pytest.raises(ValueError, match="postprocess made 8 tokens of 16, so downsample=1 or a projector over"):
        encoder(**encoder.collate([image]))
