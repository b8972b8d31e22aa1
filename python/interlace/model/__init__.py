"""Multimodal models built from unmodified HuggingFace modules.

- `sample`, `collate`: uncollated samples, and their collation into tensors.
- `modality`, `projector`: an encoder with its projector. `language`, `loss`: merging, logits, loss.
- `multimodal`: the whole model. `generate`: text generation. `checkpointing`, `lora`, `naming`, `patterns`, `rows`.
- `inputs/`: inputs of encoders. `whole/`: whole checkpoints. `checkpoints/`: folders of weights.
- `probe/`: separation tests. `stages/`: slices that ranks run. `counting/`: FLOPs and shapes.
"""

from interlace.model.checkpointing import Checkpointing, set_checkpointing
from interlace.model.counting.layers import LayerInfo, LayerPart
from interlace.model.generate import generate
from interlace.model.language import merge_tokens
from interlace.model.modality import ModalityModule
from interlace.model.multimodal import MultimodalModel, MultimodalOutput
from interlace.model.projector import (
    ItemProjector,
    LinearProjector,
    MLPProjector,
    PixelShuffleProjector,
    QFormerProjector,
)
from interlace.model.sample import IGNORE, Media, Sample, SampleOutline, shift_labels
from interlace.model.stages.slice import carve, find_layers
from interlace.model.stages.stage import StageModule

__all__ = [
    "IGNORE",
    "Checkpointing",
    "ItemProjector",
    "LayerInfo",
    "LayerPart",
    "LinearProjector",
    "MLPProjector",
    "Media",
    "ModalityModule",
    "MultimodalModel",
    "MultimodalOutput",
    "PixelShuffleProjector",
    "QFormerProjector",
    "Sample",
    "SampleOutline",
    "StageModule",
    "carve",
    "find_layers",
    "generate",
    "merge_tokens",
    "set_checkpointing",
    "shift_labels",
]
