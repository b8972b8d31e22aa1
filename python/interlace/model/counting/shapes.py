"""Number of tokens and features that an encoder makes of an item, measured on copies without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from interlace.model.inputs.base import Item
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.kinds import Feed
from interlace.model.inputs.tiles import TileInputs
from interlace.model.sample import Media
from interlace.model.stages.slice import epilogue, prologue, run

if TYPE_CHECKING:
    from interlace.model.modality import ModalityModule


def measure(encoder: ModalityModule, feeds: Sequence[Feed]) -> None:
    """Measure how many tokens the encoder makes of items, by runs of its prologue without memory.

    feeds: candidate inputs. If they differ only in the shape of clips, the first one that works is used.
    """
    images = encoder.images
    if images is not None:
        encoder.prefix = tokens_before_layers(encoder, images.default) - images.tokens(images.default)
        encoder.feed = replace(images, any_size=images.interpolates or takes_any_size(encoder, images))
    if isinstance(encoder.feed, TileInputs):
        encoder.feed = measured_tiles(encoder, encoder.feed)
    problems = []
    for feed in feeds:
        if not isinstance(feed, ClipInputs):
            continue
        encoder.feed = feed
        try:
            tokens_before_layers(encoder, encoder.default)
            encoder.feed = replace(feed, any_length=takes_any_length(encoder, feed))
            return
        except Exception as error:  # a model may raise anything
            problems.append(error)
    if problems:
        raise problems[-1]


def tokens_before_layers(encoder: ModalityModule, item: Item) -> int:
    """Tokens at the encoder's first layer for an item, including class tokens. Raises the module's own errors."""
    like = next(encoder.layers.parameters()).to("meta")
    kwargs = encoder.kwargs_of([Media(item.shape, 1, about=item.about)], like)
    hidden, _ = run(prologue(encoder.module, encoder.layer_path), encoder.layers[0], kwargs)
    if hidden.dim() != 3:
        raise ValueError(f"the input of its layers is {list(hidden.shape)}, not tokens [B, N, D]")
    return int(hidden.shape[1])


def takes_any_size(encoder: ModalityModule, images: ImageInputs) -> bool:
    """True if an image of another shape than the configured one gets the expected number of tokens."""
    other = Item((images.channels, images.patch[0] * 3, images.patch[1] * 2))
    try:
        return tokens_before_layers(encoder, other) == images.tokens(other) + encoder.prefix
    except Exception:  # a model may raise anything for a size that it does not support
        return False


def takes_any_length(encoder: ModalityModule, clips: ClipInputs) -> bool:
    """True if the encoder takes a clip of half the measured length."""
    try:
        return tokens_before_layers(encoder, clips.with_length(clips.default.shape[clips.time] // 2)) > 0
    except Exception:  # as above
        return False


def measured_tiles(encoder: ModalityModule, tiles: TileInputs) -> TileInputs:
    """Tile inputs with the length of a tile, and examples with the number of tiles found by probing.

    Raises the encoder's own errors.
    """
    height, width = tiles.tile[1:]
    encoder.feed = replace(tiles, length=tokens_before_layers(encoder, tiles.item(1, height, width)))
    examples = []
    for size in ((height, width), (2 * height, width), (height, 2 * width + width // 2)):
        fitting = (item for item in tiles.candidates(*size) if _is_taken(encoder, item))
        examples += [item for item in [next(fitting, None)] if item is not None]
    if not examples:
        features_after_layers(encoder, tiles.item(1, height, width), encoder.feed.length)  # raises with the reason
    return replace(encoder.feed, examples=tuple(examples))


def _is_taken(encoder: ModalityModule, item: Item) -> bool:
    try:
        return features_after_layers(encoder, item, encoder.feed.tokens(item)) > 0  # type: ignore[union-attr]
    except ValueError:
        return False


def features_after_layers(encoder: ModalityModule, item: Item, length: int) -> int:
    """Number of features made of the `length` tokens of an item. Raises ValueError for unsupported items."""
    like = next(encoder.layers.parameters()).to("meta")
    shape = (item.shape[0], length // item.shape[0]) if isinstance(encoder.feed, TileInputs) else (1, length)
    hidden = torch.empty((*shape, encoder.hidden_size), device="meta", dtype=like.dtype)
    shell = epilogue(encoder.module, encoder.layer_path, encoder.returned)
    kept: Any = shell.get_submodule(encoder.layer_path)[0]  # type: ignore[index]
    try:
        output, _ = run(shell, kept, encoder.feed.blank([item], encoder.packing, like), hidden=hidden)
        return encoder.features_of(output).shape[1]
    except ValueError:
        raise
    except Exception as error:  # a model may raise anything
        raise ValueError(
            f"{type(encoder.module).__name__} makes no features of an item of shape {item.shape}, about "
            f"{dict(item.about)} ({error}): pass items in the format of its image or audio processor"
        ) from error
