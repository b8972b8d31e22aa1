"""From a name and settings to a train and a held-out dataset, with the digits standing in for missing stamps."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from interlace.data.base import MultimodalDataset
from interlace.data.digits import DigitsDataset
from interlace.data.fetch import cache_folder, find_or_fetch, find_stamps
from interlace.data.stamps import StampsDataset


class Splits(NamedTuple):
    """``note`` is empty, or the one line that says why other data than asked for was loaded."""

    train: MultimodalDataset
    heldout: MultimodalDataset
    note: str = ""


def load_dataset(
    name: str = "stamps",
    *,
    tokens: Mapping[str, Callable[[tuple[int, ...]], int]],
    seed: int = 0,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    fetch: bool | Callable[[str | Path | None], tuple[Path | None, str]] = True,
    length: int | None = None,
    heldout_length: int | None = None,
    **settings: Any,
) -> Splits:
    """The train and held-out split of "stamps" or "digits".

    root: a stamps folder to use as it is; else the one in ``cache`` (default ``cache_folder()``), fetched unless
    ``fetch`` is False; a function instead gets ``cache`` and answers like ``fetch.find_or_fetch``, the default. When
    there is none, the digits are loaded and ``note`` says so and why, which nothing here logs or prints; settings
    that only the stamps have are then left aside.
    Other settings: the arguments of StampsDataset and DigitsDataset.

    In a run of many processes call it once before they start: it fetches and decodes; then every rank finds the
    same data in the cache. Raises ValueError for an unknown name and TypeError for unknown settings.
    """
    kinds: dict[str, type[StampsDataset] | type[DigitsDataset]] = {"stamps": StampsDataset, "digits": DigitsDataset}
    if name not in kinds:
        raise ValueError(f"unknown dataset {name!r}; known: {', '.join(kinds)}")
    accepted = {key: _parameters(kind) for key, kind in kinds.items()}
    unknown = sorted(set(settings) - accepted[name])
    if unknown:
        raise TypeError(f"dataset {name!r} has no settings {unknown}; it has {sorted(accepted[name])}")
    note = ""
    if name == "stamps":
        look = fetch if callable(fetch) else find_or_fetch if fetch else _only_find
        folder, trouble = (Path(root), "") if root is not None else look(cache)
        if folder is None:
            note = f"stamps not available ({trouble}): using scikit-learn's handwritten digits instead"
            name = "digits"
            settings = {key: value for key, value in settings.items() if key in accepted[name]}
        else:
            settings["root"] = folder
            if root is not None:  # leave nothing beside a folder that is the user's own
                place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
                settings["cache"] = cache_folder(cache) / "local" / place
    common: dict[str, Any] = {"tokens": tokens, "seed": seed, **settings}
    train = kinds[name](split="train", **common, length=length)
    return Splits(train, kinds[name](split="heldout", **common, length=heldout_length), note)


def _only_find(cache: str | Path | None) -> tuple[Path | None, str]:
    return find_stamps(cache), "not in the cache"


def _parameters(kind: type) -> set[str]:
    fixed = {"self", "tokens", "seed", "split", "length", "root", "cache"}
    return set(inspect.signature(kind).parameters) - fixed
