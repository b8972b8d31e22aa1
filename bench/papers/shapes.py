"""Parameters and forward FLOPs of models that papers print as shapes: transformers, and Stable Diffusion's U-Net.

A product of [m, k] and [k, n] counts 2 m k n. Attention counts 4 FLOPs per channel for each visible (query, key) pair.
Norms, activations and lookups are left out, as everywhere in the project. From FLOPs to seconds: `Gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace.costs.fitted import FREE
from interlace.plan import LayerTimes, LinkModel, ModuleCosts


@dataclass(frozen=True)
class Gpu:
    """Speed of a GPU and of its link to neighbours; efficiency is assumed, and printed as such.

    peak: FLOP/s of dense bfloat16. efficiency: the fraction of it that kernels reach. link: to the other GPUs of its
    tensor-parallel group.
    """

    name: str
    peak: float
    efficiency: float
    link: LinkModel = FREE

    def seconds(self, flops: float) -> float:
        return flops / (self.peak * self.efficiency)

    def __str__(self) -> str:
        return f"{self.name}: {self.efficiency:.0%} of {self.peak / 1e12:.0f} TFLOP/s"


A40 = Gpu("A40", 149.7e12, 0.30)
# A800: an A100 whose NVLink the paper gives as 300 GB/s in both directions together (DistTrain section 8).
A800 = Gpu("A800", 312e12, 0.60, LinkModel(10e-6, 1 / 150e9))
H100 = Gpu("H100", 989e12, 0.45, LinkModel(10e-6, 1 / 450e9))


@dataclass(frozen=True)
class Transformer:
    """layers of layer_parameters each; vocabulary: of an LLM; its head is a product and its embedding is a lookup."""

    layers: int
    hidden: int
    layer_parameters: int
    vocabulary: int = 0
    tied: bool = False

    @classmethod
    def of(
        cls,
        layers: int,
        hidden: int,
        ffn: int,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        gated: bool = False,
        vocabulary: int = 0,
        tied: bool = False,
    ) -> Transformer:
        """Transformer from the sizes of its products; gated: three in the FFN, as in Llama, instead of two."""
        keys = hidden // heads * (kv_heads or heads)
        layer = 2 * hidden * hidden + 2 * hidden * keys + (3 if gated else 2) * hidden * ffn
        return cls(layers, hidden, layer, vocabulary, tied)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def layer_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of the forward of one layer; pairs: visible (query, key) pairs."""
        return 2.0 * self.layer_parameters * tokens + 4.0 * pairs * self.hidden

    def head_flops(self, tokens: float) -> float:
        return 2.0 * self.vocabulary * self.hidden * tokens

    def flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of the forward of all layers and the head."""
        return self.layers * self.layer_flops(tokens, pairs) + self.head_flops(tokens)

    def costs(
        self,
        tokens: float,
        pairs: float,
        seconds_per_flop: float,
        *,
        trainable: bool = False,
        projector: int | None = None,
    ) -> ModuleCosts:
        """Seconds of each layer for one chunk; a gradient of inputs or of weights takes as long as the forward.

        projector: width of the linear layer that follows the last layer, always trained. The head, if any, is part of
        the last layer.
        """
        forward = [self.layer_flops(tokens, pairs)] * self.layers
        layer, trains = list(range(self.layers)), [trainable] * self.layers
        if self.vocabulary:
            forward.append(self.head_flops(tokens))
            layer.append(self.layers - 1)
            trains.append(trainable)
        if projector is not None:
            forward.append(2.0 * self.hidden * projector * tokens)
            layer.append(self.layers - 1)
            trains.append(True)
        return costs_of(np.array(forward) * seconds_per_flop, np.array(layer), np.array(trains))


def costs_of(forward: NDArray[np.float64], layer: NDArray[np.int64], trainable: NDArray[np.bool_]) -> ModuleCosts:
    """Costs of parts, each of whose two gradients takes as long as its forward (cornstarch-2025-03 section 4.2)."""
    return ModuleCosts(layer.astype(np.int64), LayerTimes(forward, forward, forward, forward), trainable)


def causal_pairs(tokens: float) -> float:
    """Visible pairs of one causal row."""
    return tokens * (tokens + 1) / 2


# ---------------------------------------------------------------------- Stable Diffusion 2.1


class Network(NamedTuple):
    parameters: float
    flops: float


UNET_CHANNELS = (320, 640, 1280, 1280)
UNET_TIME = 1280  # width of the time embedding
UNET_TEXT = (77, 1024)  # tokens and width of the text that cross-attention reads


def unet(side: int) -> Network:
    """The U-Net of Stable Diffusion 2.1 on a latent of side x side (an image of 8 * side): parameters, forward FLOPs.

    From its published configuration: two residual blocks a level on the way down and three on the way up, a transformer
    block after each except on the lowest level, and one between two in the middle.
    """
    parameters = flops = 0.0

    def product(weights: float, positions: float) -> None:
        nonlocal parameters, flops
        parameters += weights
        flops += 2 * weights * positions

    def residual(channels: int, out: int, n: int) -> None:
        product(9 * channels * out, n)
        product(9 * out * out, n)
        product(UNET_TIME * out, 1)
        if channels != out:
            product(channels * out, n)

    def attention(c: int, n: int) -> None:
        nonlocal flops
        text, width = UNET_TEXT
        product((2 + 4 + 2 + 12) * c * c, n)  # in and out, self attention, queries and output across, gated FFN
        product(2 * width * c, text)
        flops += 4.0 * c * n * (n + text)

    levels = len(UNET_CHANNELS)
    kept = [UNET_CHANNELS[0]]
    product(9 * 4 * UNET_CHANNELS[0], side**2)
    product(UNET_CHANNELS[0] * UNET_TIME + UNET_TIME**2, 1)
    channels, n = UNET_CHANNELS[0], side**2
    for level, out in enumerate(UNET_CHANNELS):
        for _ in range(2):
            residual(channels, out, n)
            channels = out
            if level < levels - 1:
                attention(out, n)
            kept.append(out)
        if level < levels - 1:
            n //= 4
            product(9 * out * out, n)
            kept.append(out)
    residual(channels, channels, n)
    attention(channels, n)
    residual(channels, channels, n)
    for level, out in reversed(list(enumerate(UNET_CHANNELS))):
        for _ in range(3):
            residual(channels + kept.pop(), out, n)
            channels = out
            if level < levels - 1:
                attention(out, n)
        if level > 0:
            n *= 4
            product(9 * out * out, n)
    product(9 * channels * 4, n)
    return Network(parameters, flops)
