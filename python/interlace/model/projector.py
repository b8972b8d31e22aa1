"""Projectors: map encoder features to language-model embeddings; may stack neighbouring tokens first."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.parallel.sending import to_device

Grid = tuple[int, int]


class LinearProjector(nn.Module):
    """[n, inputs] -> [n, outputs], one linear layer."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


class MLPProjector(nn.Module):
    """[n, inputs] -> [n, outputs] through one hidden layer of `outputs` units with GELU (as in LLaVA-1.5)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.up = nn.Linear(inputs, outputs)
        self.down = nn.Linear(outputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(features)))


class ItemProjector(nn.Module):
    """Base class of projectors that process an item as a whole and may change its number of tokens.

    forward(features [sum n_i, inputs], lengths, grids) -> [sum of tokens, outputs], items concatenated.
    lengths: the n_i.
    grids: (rows, columns) of each image's features; None if they form no grid (sound, pooled features).
    unit: rows and columns must be multiples of it. Code that selects image sizes uses it.
    """

    unit = 1

    def tokens(self, features: int, grid: Grid | None) -> int:
        """Number of tokens for an item with `features` features. Raises ValueError for an unsupported item."""
        return features


class PixelShuffleProjector(ItemProjector):
    """Pixel shuffle: scale x scale neighbouring patches become one token, followed by a norm and an MLP.

    A joined token has scale * scale * inputs features (InternVL 1.5 section 3.1; Idefics 3 with scale 4). Raises
    ValueError if scale is not an integer of at least 1, and for items that are not grids with sides divisible by it.
    """

    def __init__(self, inputs: int, outputs: int, *, scale: int = 2):
        super().__init__()
        if type(scale) is not int or scale < 1:
            raise ValueError(f"pixel_shuffle joins scale x scale patches: scale must be 1 or more, not {scale!r}")
        self.scale = self.unit = scale
        self.norm = nn.LayerNorm(inputs * scale**2)
        self.up = nn.Linear(inputs * scale**2, outputs)
        self.down = nn.Linear(outputs, outputs)

    def tokens(self, features: int, grid: Grid | None) -> int:
        if grid is None:
            raise ValueError(
                "pixel_shuffle joins neighbouring patches of an image, but these features are not a grid of patches: "
                "use the projector mlp, with downsample for fewer tokens"
            )
        if grid[0] % self.scale or grid[1] % self.scale:
            raise ValueError(
                f"{grid[0]} x {grid[1]} patches cannot be joined {self.scale} x {self.scale}: resize images so that "
                f"rows and columns of patches are multiples of {self.scale}"
            )
        return features // self.scale**2

    def forward(self, features: Tensor, lengths: Sequence[int], grids: Sequence[Grid | None]) -> Tensor:
        joined = []
        for item, grid in zip(features.split(list(lengths)), grids, strict=True):
            self.tokens(len(item), grid)
            assert grid is not None
            blocks = item.view(grid[0] // self.scale, self.scale, grid[1] // self.scale, self.scale, -1)
            joined.append(blocks.transpose(1, 2).reshape(-1, item.shape[1] * self.scale**2))
        return self.down(nn.functional.gelu(self.up(self.norm(torch.cat(joined)))))


class QFormerProjector(ItemProjector):
    """Q-Former: a fixed number of learned queries, which attend to each other and to the features of each item.

    A linear layer follows. Items may be of any kind; each becomes `queries` tokens (BLIP-2 section 3.1; transformers'
    Blip2QFormerModel).

    hidden: width of the queries; default: width of the features.
    Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        queries: int = 32,
        layers: int = 2,
        heads: int = 8,
        hidden: int | None = None,
    ):
        super().__init__()
        hidden = inputs if hidden is None else hidden
        sizes = {"queries": queries, "layers": layers, "heads": heads, "hidden": hidden}
        if wrong := [f"{key} = {value!r}" for key, value in sizes.items() if type(value) is not int or value < 1]:
            raise ValueError(f"a qformer needs integers of at least 1, not {', '.join(wrong)}")
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide the qformer's width {hidden}: change heads or hidden")
        from transformers import Blip2QFormerConfig, Blip2QFormerModel

        config = Blip2QFormerConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            encoder_hidden_size=inputs,
            cross_attention_frequency=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        self.queries = nn.Parameter(torch.empty(1, queries, hidden))
        self.qformer = Blip2QFormerModel(config)
        self.out = nn.Linear(hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the queries as in BLIP-2."""
        nn.init.normal_(self.queries, std=0.02)

    def tokens(self, features: int, grid: Grid | None) -> int:
        return self.queries.shape[1]

    def forward(self, features: Tensor, lengths: Sequence[int], grids: Sequence[Grid | None]) -> Tensor:
        # One item at a time: with padding to a common length, sums of an item would depend on the rest of the batch.
        out = [self.qformer(self.queries, encoder_hidden_states=item[None]) for item in features.split(list(lengths))]
        return self.out(torch.cat([each.last_hidden_state[0] for each in out]))


PROJECTORS: dict[str, type[nn.Module]] = {
    "linear": LinearProjector,
    "mlp": MLPProjector,
    "pixel_shuffle": PixelShuffleProjector,
    "qformer": QFormerProjector,
}


def project(
    projector: nn.Module | None, features: Tensor, lengths: Sequence[int], grids: Sequence[Grid | None], downsample: int
) -> Tensor:
    """Project the features [sum n_i, D] of items. First, every `downsample` consecutive features are joined.

    lengths: the n_i, before any callback that changed the number of features.
    grids: grid of each item's features after joining.
    Raises ValueError if items must be separated but a callback has changed their lengths.
    """
    if len(features) != sum(lengths):
        if downsample > 1 or isinstance(projector, ItemProjector):
            raise ValueError(
                f"postprocess made {len(features)} tokens of {sum(lengths)}, so downsample={downsample} or a projector "
                "over whole items cannot find the items: stack tokens in the callback, set downsample=1 "
                'and use the projector "linear" or "mlp"'
            )
        lengths = [len(features)]
    features = stack_tokens(features, lengths, downsample)
    if isinstance(projector, ItemProjector):
        made: Tensor = projector(features, [-(-n // downsample) for n in lengths], grids)
        return made
    return features if projector is None else projector(features)


def count_tokens(projector: nn.Module | type[nn.Module] | None, features: int, grid: Grid | None) -> int:
    """Number of tokens for an item with this many features. Raises ValueError if it is unknown or impossible."""
    if isinstance(projector, ItemProjector):
        return projector.tokens(features, grid)
    if isinstance(projector, type) and issubclass(projector, ItemProjector):
        raise ValueError(
            f"{projector.__name__} determines the number of tokens of an item, but does not exist yet: put the encoder "
            "into a MultimodalModel first"
        )
    return features


def unit_of(projector: nn.Module | None) -> int:
    """Unit of a projector: rows and columns of an image's features must be multiples of it."""
    return projector.unit if isinstance(projector, ItemProjector) else 1


def make_projector(projector_class: type[nn.Module], inputs: int, outputs: int, config: Mapping[str, Any]) -> nn.Module:
    """Create a projector of that class. Raises ValueError for arguments that the class does not take."""
    name = next((key for key, each in PROJECTORS.items() if each is projector_class), projector_class.__name__)
    try:
        inspect.signature(projector_class).bind(inputs, outputs, **config)
    except TypeError as error:
        known = ", ".join(list(inspect.signature(projector_class).parameters)[2:]) or "none"
        raise ValueError(
            f"projector {name} is called with (in_features, out_features, **projector_config), but: {error}; its "
            f"arguments after the first two: {known}"
        ) from None
    try:
        return projector_class(inputs, outputs, **config)
    except ValueError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"projector {name} cannot be made: {type(error).__name__}: {error}") from error


def stack_tokens(features: Tensor, lengths: Sequence[int], k: int) -> Tensor:
    """Stack `k` consecutive tokens of each item into one: [sum n_i, D] -> [sum ceil(n_i / k), k * D].

    Groups never cross items; an item's last group is padded with zeros. `lengths` are the n_i.
    """
    if k == 1:
        return features
    stacked = [-(-n // k) for n in lengths]
    target: list[int] = []
    start = 0
    for n, m in zip(lengths, stacked, strict=True):
        target.extend(range(start, start + n))
        start += m * k
    padded = features.new_zeros(start, features.shape[1])
    places = to_device(torch.tensor(target, dtype=torch.int64, device="cpu"), features.device)
    padded = padded.index_copy(0, places, features)
    return padded.view(start // k, k * features.shape[1])
