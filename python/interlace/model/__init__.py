"""Multimodal models made of unmodified HuggingFace modules, and their slices as pipeline stages.

sample.py and collate.py (data in) · modality.py and projector.py (an encoder) · language.py (merging, loss) ·
multimodal.py (the whole) · slice.py and stage.py (slicing) · describe.py (costs) · checkpointing.py · generate.py ·
naming.py and patterns.py (names of parts) · lora.py (adapters) · places.py (where media and targets stand) ·
counted.py, pairs.py and flops.py (what modules compute)
"""

from interlace.model.checkpointing import Checkpointing, set_checkpointing
from interlace.model.describe import LayerInfo, LayerPart
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
from interlace.model.slice import carve, find_layers
from interlace.model.stage import StageModule

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
