"""Sizes of a step's chunks, from the lengths of their samples; input of cost estimates."""

from __future__ import annotations

from interlace.costs.step import Size
from interlace.model import Media, ModalityModule, MultimodalModel
from interlace.model.counting.pairs import Document, visited
from interlace.model.inputs.patches import PatchInputs
from interlace.model.inputs.tiles import TileInputs
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.rows import ALONE, PACKED, ROWS
from interlace.run.tables.table import Samples
from interlace.schedule import StepTable


def chunk_sizes(mllm: MultimodalModel, table: StepTable, samples: Samples) -> list[Size]:
    """The size of each chunk of `table`; samples: those of the step, which need not be decoded."""
    return [size_of(mllm, chunk.module, [samples[i] for i in chunk.samples.tolist()]) for chunk in table.chunks]


def size_of(mllm: MultimodalModel, module: str, samples: Samples) -> Size:
    """The size of one chunk of `module` with these samples: rows and pairs as its layers compute them.

    Attention windows are ignored: the time of a layer with a window grows with rows, which a fit covers.
    """
    if module == LANGUAGE_MODEL:
        return _language(mllm, samples)
    encoder = mllm.encoders[module]
    lengths, documents = [], []
    for item in (item for sample in samples for item in sample.media.get(module, ())):
        length = encoder.encoder_length(item.shape, item.about)
        pieces = _pieces(encoder, item)
        lengths.append(length)
        documents += [Document(length // pieces)] * pieces
    if not lengths:
        return Size(0, 0)
    if encoder.packing == PACKED or encoder.in_one_row:
        return Size(sum(lengths), visited(documents))
    rows = len(lengths) * max(lengths) if encoder.packing == ROWS else sum(lengths)
    return Size(rows, sum(visited([document]) for document in documents))


def _pieces(encoder: ModalityModule, item: Media) -> int:
    """Number of documents (frames or tiles) into which an encoder cuts an item."""
    if not isinstance(encoder.feed, (PatchInputs, TileInputs)):
        return 1
    return int(item.about["grid_thw"][0]) if "grid_thw" in item.about else max(int(item.shape[0]), 1)


def _language(mllm: MultimodalModel, samples: Samples) -> Size:
    settings = mllm.language_settings
    lengths = [len(sample) for sample in samples]
    targets = sum(sample.targets for sample in samples)
    documents, longest = [Document(length, True) for length in lengths], max(lengths, default=0)
    if settings.packing == ROWS:
        pairs = sum(visited([document], row=longest) for document in documents)
        return Size(longest * len(lengths), pairs, targets)
    if settings.packing == ALONE or (settings.limit is not None and longest > settings.limit):
        return Size(sum(lengths), sum(visited([document]) for document in documents), targets)
    return Size(sum(lengths), visited(documents), targets)
