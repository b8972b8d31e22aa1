"""Reads weights of a whole HuggingFace checkpoint; a rank reads its own part only.

The keys of a file may differ from the names in the model: HuggingFace has renamed parts of its models, and has the
conversions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from interlace.model.patterns import base_name, is_adapter
from interlace.train.models.pretrained import (
    MADE_ANEW,
    Source,
    check_shapes,
    contents_of,
    converted,
    present,
    refuse_buffers,
    refuse_missing,
    same_values,
    untie,
)

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def contents_of_whole(whole: nn.Module, folder: Path) -> dict[str, Source]:
    """The contents of `folder` under the names in HuggingFace's model `whole`.

    Raises ValueError for a folder that cannot be read, and for one that has a weight twice with different values.
    """
    files = contents_of(folder)
    stored = converted(whole, files)
    for key in files.keys() & {base_name(key) for key in whole.state_dict()}:  # present names: nothing to rename
        made = stored.setdefault(key, files[key])
        if made.tensors() == [files[key]]:  # the layout may differ: Qwen3-VL-MoE's experts were transposed
            continue
        if not same_values(made, files[key]):
            raise ValueError(
                f"{folder} has {key!r} twice, with different values: the other one is made of "
                f"{made.tensors()[0].key!r}; remove the one that is wrong"
            )
        stored[key] = files[key]
    return stored


def untie_whole(whole: nn.Module, folder: Path) -> None:
    """As `untie`, for HuggingFace's model `whole` before it is cut into its modules."""
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    untie(whole, {name: name for name in names}, contents_of_whole(whole, folder))


def find_whole(model: MultimodalModel, folder: Path) -> dict[str, Source]:
    """First name of each parameter of a `MultimodalModel.of_whole` model -> its source in `folder`.

    Adapters (LoRA) are not in such folders. Raises ValueError if a parameter is missing or has another shape, and if
    the folder has extra weights, including buffers.
    """
    whole = model.whole()
    stored, kind = contents_of_whole(whole, folder), type(whole).__name__
    every = [name for name, _ in model.named_parameters(remove_duplicate=False) if not is_adapter(name)]
    names = {name: base_name(model.name_in_whole(name)) for name in every}
    wanted = {name: weight for name, weight in model.named_parameters() if not is_adapter(name)}
    sources = present(model, names, stored)
    refuse_missing(folder, [names[name] for name in wanted if name not in sources], kind)
    known = set(names.values())
    own = {base_name(key) for key in whole.state_dict()}
    refuse_buffers(folder, own & (stored.keys() - known))
    if left := sorted(key for key in stored if key not in known and not key.endswith(MADE_ANEW)):
        raise ValueError(f"{folder} has {left[0]!r}, but {kind} does not: its config.json is of another model")
    check_shapes(wanted, sources)
    return sources
