"""Weights of a whole HuggingFace checkpoint, a rank's part of them alone.

The keys of a file may differ from the names in the model: HuggingFace has renamed parts of its models, and knows how.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.pretrained import MADE_ANEW, Stored, check_shapes, contents

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def find_whole(model: MultimodalModel, folder: Path) -> dict[str, Stored]:
    """Where `folder` has each parameter of a model of `MultimodalModel.of_whole`, by its first name.

    Raises ValueError when one is missing or of another shape, when the folder has more, and for weights that the
    library computes from several others while it reads them: a rank could not read its part of them alone.
    """
    stored = contents(folder)
    whole = model.whole()
    key_of = _keys(whole, stored)
    kind = type(whole).__name__
    names = {name: model.name_in_whole(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = dict(model.named_parameters())
    if missing := [name for name in wanted if names[name] not in key_of]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} has no weight {names[missing[0]]!r}{more}, which {kind} needs")
    used = {key_of[name] for name in names.values() if name in key_of}
    if left := sorted(key for key in set(stored) - used if not key.endswith(MADE_ANEW)):
        raise ValueError(f"{folder} has {left[0]!r}, which {kind} has not: it would compute something else")
    found = {name: stored[key_of[names[name]]] for name in wanted}
    check_shapes(wanted, found)
    return found


def _keys(whole: Any, stored: dict[str, Stored]) -> dict[str, str]:
    """Name in the model -> key in the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(whole)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = whole.state_dict()
    found: dict[str, str] = {}
    for key in stored:
        name, converted = rename_source_key(key, renamings, converters, whole.base_model_prefix, state)
        if key in state:
            name, converted = key, None
        if converted is not None:
            raise ValueError(
                f"{stored[key].file} has {key!r}, which the library makes {name!r} of while it reads: save the model "
                f"again with {type(whole).__name__}.from_pretrained(folder).save_pretrained(new, save_original_format="
                "False), or load it in Python with MultimodalModel.from_pretrained"
            )
        found[name] = key
    return found
