"""Multimodal models from unmodified HuggingFace modules, whole or cut into pipeline stages.

multimodal.py (MultimodalModel) · modality.py (encoder + projector + callbacks) · slice.py (cutting by module path) ·
stage.py (what a pipeline stage runs) · sample.py, collate.py (uncollated samples -> inputs) · projector.py ·
describe.py (layers and their costs).
"""

from interlace.model.describe import LayerInfo, Part
from interlace.model.modality import ModalityModule
from interlace.model.multimodal import MultimodalModel, MultimodalOutput, merge_tokens
from interlace.model.projector import Projector
from interlace.model.sample import IGNORE, Media, Sample
from interlace.model.stage import StageModule

__all__ = [
    "IGNORE",
    "LayerInfo",
    "Media",
    "ModalityModule",
    "MultimodalModel",
    "MultimodalOutput",
    "Part",
    "Projector",
    "Sample",
    "StageModule",
    "merge_tokens",
]
