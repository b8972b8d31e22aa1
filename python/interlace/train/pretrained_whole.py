"""Weights of a whole HuggingFace checkpoint, a rank's part of them alone.

The keys of a file may differ from the names in the model: HuggingFace has renamed parts of its models, and knows how.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train.pretrained import MADE_ANEW, Source, check_shapes, contents_of, converted

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def find_whole(model: MultimodalModel, folder: Path) -> dict[str, Source]:
    """Where `folder` has each parameter of a model of `MultimodalModel.of_whole`, by its first name.

    Raises ValueError when one is missing or of another shape, and when the folder has more.
    """
    files, whole = contents_of(folder), model.whole()
    stored = converted(whole, files)
    for key in files.keys() & whole.state_dict().keys():  # saved under today's names: nothing to rename
        stored[key] = files[key]
    kind = type(whole).__name__
    names = {name: model.name_in_whole(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = dict(model.named_parameters())
    if missing := [name for name in wanted if names[name] not in stored]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} has no weight {names[missing[0]]!r}{more}, which {kind} needs")
    known = {*names.values(), *whole.state_dict()}
    if left := sorted(key for key in stored if key not in known and not key.endswith(MADE_ANEW)):
        raise ValueError(f"{folder} has {left[0]!r}, which {kind} has not: it would compute something else")
    found = {name: stored[names[name]] for name in wanted}
    check_shapes(wanted, found)
    return found
