"""Weights of a whole HuggingFace checkpoint, a rank's part of them alone.

The keys of a file may differ from the names in the model: HuggingFace has renamed parts of its models, and knows how.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlace.model.patterns import base_name, is_adapter
from interlace.train.pretrained import (
    MADE_ANEW,
    Source,
    check_shapes,
    contents_of,
    converted,
    refuse_buffers,
    refuse_missing,
)

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def find_whole(model: MultimodalModel, folder: Path) -> dict[str, Source]:
    """Where `folder` has each parameter of a model of `MultimodalModel.of_whole`, by its first name; adapters (LoRA)
    are in no such folder.

    Raises ValueError when one is missing or of another shape, and when the folder has more, buffers too.
    """
    files, whole = contents_of(folder), model.whole()
    stored = converted(whole, files)
    own = {base_name(key) for key in whole.state_dict()}
    for key in files.keys() & own:  # saved under today's names: nothing to rename
        stored[key] = files[key]
    kind = type(whole).__name__
    every = [name for name, _ in model.named_parameters(remove_duplicate=False) if not is_adapter(name)]
    names = {name: base_name(model.name_in_whole(name)) for name in every}
    wanted = {name: weight for name, weight in model.named_parameters() if not is_adapter(name)}
    refuse_missing(folder, [names[name] for name in wanted], stored, kind)
    refuse_buffers(folder, own & (stored.keys() - set(names.values())))
    known = set(names.values())
    if left := sorted(key for key in stored if key not in known and not key.endswith(MADE_ANEW)):
        raise ValueError(f"{folder} has {left[0]!r}, which {kind} has not: config.json is of another model")
    found = {name: stored[names[name]] for name in wanted}
    check_shapes(wanted, found)
    return found
