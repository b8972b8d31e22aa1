"""A modality from outside the package: 3D point clouds (points, features) in .npy files, with an encoder for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, SiglipVisionConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from interlace.modalities import Modality
from interlace.modalities.base import DataSettings, Geometry, Scaling, Shape, Size, Spec
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.modalities.files import check_file, opened
from interlace.modalities.limits import Limits
from interlace.model.inputs.base import Item
from interlace.model.inputs.clips import ClipInputs


@dataclass(frozen=True)
class CloudSpec:
    features: int
    most: int = 64
    modality: ClassVar[str] = "cloud"

    def item_shape(self, path: str, size: Size, limits: Limits, *, strict: bool) -> Shape:
        points, features = (int(number) for number in size)
        if features != self.features:
            raise BrokenSampleError("size", f"{path}: {features} features per point, and the encoder takes others")
        return min(points, self.most), features

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)


class PointCloud(Modality):
    name = "cloud"
    suffixes = (".npy",)
    question = "Describe the object."
    wanted = "(points, features)"
    size_keys = ("points", "features")
    arguments = ("points",)

    def probe(self, path: str, *, decode: bool) -> Size:
        check_file(path)
        try:
            array = _read(path)
        except (OSError, ValueError) as error:
            raise BrokenSampleError("broken file", f"{path}: {error}") from None
        if array.ndim != 2:
            raise BrokenSampleError("broken file", f"{path}: {array.ndim} dimensions, not (points, features)")
        return array.shape

    def load(self, path: str, spec: Spec, shapes: Sequence[Shape], limits: Limits) -> list[np.ndarray]:
        try:
            array = _read(path)
        except (OSError, ValueError) as error:
            raise DecodeError(f"{path}: {error}") from error
        return [array[: shape[0]].astype(np.float32) for shape in shapes]

    def inputs(self, module: Any, config: Any, layer_path: str) -> Sequence[Any]:
        return [ClipInputs("points", Item((64, module.embed.in_features)), 0)]

    def spec(self, geometry: Geometry, data: DataSettings) -> CloudSpec:
        return CloudSpec(geometry.shape[1])

    def preview(self, path: str, name: str) -> str:
        return f"<figcaption>{name}, {len(_read(path))} points</figcaption>"

    def picture(self, data: Tensor, scaling: Scaling | None) -> tuple[str, np.ndarray]:
        """The cloud from above."""
        image = np.full((16, 16, 3), 255, np.uint8)
        places = ((data[:, :2].clamp(-1, 1) + 1) * 7.5).long().numpy()
        image[places[:, 1], places[:, 0]] = 0
        return self.name, image


def _read(path: str) -> np.ndarray:
    with opened(path) as file:
        array: np.ndarray = np.load(file, allow_pickle=False)
    return array


class PointEncoder(PreTrainedModel):
    """Transformer over the points of a cloud, without positions."""

    config_class = SiglipVisionConfig
    main_input_name = "points"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, features: int, config: SiglipVisionConfig) -> None:
        super().__init__(config)
        self.embed = nn.Linear(features, config.hidden_size)
        self.layers = nn.ModuleList(SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, points: Tensor) -> BaseModelOutput:
        """points: float [clouds, points, features]."""
        hidden = self.embed(points)
        for layer in self.layers:
            hidden = layer(hidden, None)
        return BaseModelOutput(last_hidden_state=hidden)
