"""Facts of each rank's machine and their differences, for `interlace doctor cluster`.

Facts are JSON-serializable. This module does not communicate with other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

Facts = dict[str, Any]
K = TypeVar("K")
GIB = 1 << 30
LEAST_DISK = GIB  # bytes free in the run folder's file system
LEAST_SHARED = 64 << 20  # bytes free in /dev/shm for each rank of a host; the default of a whole container
CLOCK_SECONDS = 1.0  # larger clock offsets make the order of log lines meaningless
EQUAL = {
    "python": "Python",
    "torch": "torch",
    "transformers": "transformers",
    "interlace": "interlace",
    "cuda": "the CUDA that torch was built for",
    "nccl": "NCCL",
    "kind": "the kind of device",
}
"""Facts that must be equal on every rank -> display name."""
_FILES = (".py", ".so", ".pyi")
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "INTERLACE_TRANSPORT")


class Form(BaseModel):
    """Schema for the facts of a peer, which may run another version: all compared keys are required."""

    model_config = ConfigDict(extra="forbid")

    host: str
    python: str
    torch: str
    transformers: str
    interlace: str
    cuda: str
    nccl: str
    kind: str
    gpu: str
    config: str
    files: dict[str, str]
    disk: int
    shared: int
    memlock: int
    settings: dict[str, str]


class Trouble(NamedTuple):
    """A problem. what: description with the ranks. do: remedy."""

    what: str
    do: str


def gather(config: Path | None, folder: Path, kind: str, local_rank: int) -> Facts:
    """The facts of this process.

    config: the file of the run, None for none. folder: parent of the run folders. kind: "cpu" or "cuda", device of this
    rank; local_rank: number of its GPU. Raises OSError for a config that cannot be read.
    """
    import torch

    import interlace
    from interlace.train.commands.tables import version_of

    facts: Facts = {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "interlace": interlace.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": _nccl() if kind == "cuda" else "not used",
        "kind": kind,
        "gpu": "",
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config is not None else "",
        "files": package_files(Path(interlace.__file__).parent),
        "disk": _free(folder),
        "shared": _free(Path("/dev/shm")),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "settings": {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)},
    }
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(local_rank)
        facts["gpu"] = f"{properties.name}, {getattr(properties, 'uuid', f'number {local_rank}')}"
    return facts


def package_files(root: Path) -> dict[str, str]:
    """Relative path -> 16 hexadecimal digits of the content's hash, for every code file of a package."""
    hashes = {}
    for folder, _, files in os.walk(root, followlinks=True):  # in a checkout the kernels are a symlink
        for file in files:
            path = Path(folder) / file
            if path.suffix in _FILES:
                hashes[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return dict(sorted(hashes.items()))


def compare(facts: Sequence[Facts]) -> list[Trouble]:
    """Problems in the facts of all ranks, which are in rank order."""
    return list(_troubles(facts))


def _troubles(facts: Sequence[Facts]) -> Iterator[Trouble]:
    for name, called in EQUAL.items():
        if groups := _different([each[name] for each in facts]):
            yield Trouble(f"{called} differs: {_groups_text(groups)}", f"install one version of {called} everywhere")
    if groups := _different([each["config"] for each in facts]):
        groups_text = _groups_text({(digest[:8] or "none"): ranks for digest, ranks in groups.items()})
        yield Trouble(f"the config file differs: {groups_text}", "copy one config file to every host")
    yield from _other_files([each["files"] for each in facts])
    for (host, gpu), ranks in groups_of([(each["host"], each["gpu"]) for each in facts]).items():
        if gpu and len(ranks) > 1:
            text = f"{ranks_in_words(ranks)} are on one GPU of {host} ({gpu})"
            yield Trouble(text, "start one rank per GPU, and give each process the same CUDA_VISIBLE_DEVICES")
    for host, ranks in groups_of([each["host"] for each in facts]).items():
        disk = min(facts[rank]["disk"] for rank in ranks)
        shared = min(facts[rank]["shared"] for rank in ranks)
        if 0 <= disk < LEAST_DISK:
            text = f"{host} has {disk / GIB:.2f} GiB free where runs go"
            yield Trouble(text, "free space, or set run.folder")
        if 0 <= shared < LEAST_SHARED * len(ranks):
            text = f"{host} has {shared >> 20} MiB free in /dev/shm for {len(ranks)} ranks"
            yield Trouble(text, f"give it {LEAST_SHARED * len(ranks) >> 20} MiB or more (docker: --shm-size)")


def settings_that_differ(facts: Sequence[Facts]) -> list[str]:
    """Settings of NCCL and gloo that differ between ranks. These are notes, not problems: interfaces may differ."""
    names = sorted({name for each in facts for name in each["settings"]})
    values = {name: _different([each["settings"].get(name, "not set") for each in facts]) for name in names}
    return [f"{name} differs: {_groups_text(groups)}" for name, groups in values.items() if groups]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2", "ranks 0 to 7"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _other_files(files: Sequence[Mapping[str, str]]) -> Iterator[Trouble]:
    """Package files that differ from rank 0's; ranks with the same differences share one problem."""
    others = [{name for name in {*files[0], *mine} if files[0].get(name) != mine.get(name)} for mine in files]
    for names, ranks in groups_of(tuple(sorted(names)) for names in others).items():
        if not names:
            continue
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = f"{ranks_in_words(ranks)} and rank 0 have other files of interlace: {shown}"
        yield Trouble(text, "install the same wheel, or the same commit built in the same way, on every host")


def _different(values: Sequence[str]) -> dict[str, list[int]]:
    """Value -> ranks, the most common value first; empty if all are equal."""
    groups = groups_of(values)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1]))) if len(groups) > 1 else {}


def groups_of(values: Iterable[K]) -> dict[K, list[int]]:
    """Value -> its places."""
    groups: dict[K, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault(value, []).append(place)
    return groups


def _groups_text(groups: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in groups.items())


def _nccl() -> str:
    import torch

    with contextlib.suppress(Exception):  # a build without NCCL
        return ".".join(map(str, torch.cuda.nccl.version()))
    return "missing"


def _free(folder: Path) -> int:
    """Bytes free at the first existing parent of the folder; -1 if unknown."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return -1
