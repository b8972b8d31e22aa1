"""Checkpoints: torch.distributed.checkpoint keyed by global parameter name, written atomically, verified before use.

A checkpoint is a folder ``step-00000100`` with DCP's files and ``manifest.json``. Its keys:

    model.<FQN>                        every parameter under its name in the one-process model
    optimizer.{exp_avg,exp_avg_sq,step}.<FQN>
    rng.<rank>                         python, numpy and torch generators of that rank (JSON as bytes)
    progress                           step, dataloader state, counters (JSON as bytes), the same on all ranks

Nothing in it knows about stages or ranks (but the generators), so a run may go on under another placement or another
number of ranks; on the same one it goes on bit for bit.

Writing: all ranks write into ``.step-00000100.tmp``; rank 0 then lists every file with size and SHA-256 in the
manifest, syncs the files and folders to disk and renames the folder. A folder without ``.tmp`` is therefore complete,
unless the disk lost something afterwards: `newest` verifies sizes and checksums, names the torn file, sets that
checkpoint aside (``.torn``) and takes the one before. A checkpoint that is written again steps aside
(``.step-00000100.old``) while the new one takes its name; cut short in between, the old one is brought back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from interlace.train.peers import Peers

MANIFEST = "manifest.json"
FORMAT = 1
_OLD = ".old"
TORN, SUPERSEDED = ".torn", ".superseded"  # endings of checkpoints that were set aside
SLOWEST_DISK = 20e6  # bytes per second: what the ranks wait for before they call one of them lost


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says which file or what differs, and what to do."""


class TornCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed."""


def fingerprint(model: nn.Module, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree between a checkpoint and a model: the architecture table and every parameter's shape and dtype.

    `model` may live on the meta device. `architecture` is JSON-able (`build.architecture` makes it from a config).
    """
    parameters = {name: [list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in model.named_parameters()}
    identity = {"architecture": json.loads(json.dumps(architecture)), "parameters": parameters}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return {"sha256": digest, **identity}


def seconds_to_write(identity: Mapping[str, Any]) -> float:
    """How long a checkpoint may take on a slow disk: weights and two moments of every parameter, in 4 bytes each."""
    return sum(12.0 * math.prod(shape) for shape, _ in identity["parameters"].values()) / SLOWEST_DISK


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], limit: int = 4) -> list[str]:
    """How two fingerprints differ, in words, the most telling first; at most `limit` lines and a count of the rest."""
    lines = [
        f"model.{key} is {old!r} in the checkpoint, {new!r} in the config"
        for key, old, new in _compare(_flatten(saved["architecture"]), _flatten(wanted["architecture"]))
    ]
    lines += [
        f"{name} is {_tensor(old)} in the checkpoint, {_tensor(new)} in the model"
        for name, old, new in _compare(saved["parameters"], wanted["parameters"])
    ]
    rest = len(lines) - limit
    return lines[:limit] + ([f"and {rest} more"] if rest > 0 else [])


class Checkpoints:
    """The checkpoints of one run, as one rank sees them; all ranks make the same calls in the same order.

    `folder` is shared by all ranks, `keep` how many complete checkpoints stay, `identity` the model's `fingerprint`,
    `peers` the other ranks. A rank that does not come along is a TrainingError that names it.
    """

    def __init__(self, folder: Path, *, keep: int, identity: Mapping[str, Any], peers: Peers | None = None) -> None:
        self.folder, self.keep, self.identity = Path(folder), keep, identity
        self.peers = peers or Peers(60.0, allowance=seconds_to_write(identity))
        self.distributed, self.rank = self.peers.distributed, self.peers.rank

    def save(
        self,
        step: int,
        parameters: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        progress: Mapping[str, Any],
    ) -> Path:
        """Writes this rank's `parameters` (by FQN) and `optimizer` tensors (``exp_avg.<FQN>`` ...) with the rest.

        Returns the finished folder. Raises what the file system raises, or TrainingError for what DCP met with (a
        full disk leaves only a ``.tmp`` folder).
        """
        final = self.folder / name_of(step)
        draft = self.folder / f".{final.name}.tmp"
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(leftover)
            restore(self.folder)
            draft.mkdir()
        self.peers.barrier(f"beginning checkpoint {final.name}")
        state: dict[str, Tensor] = {f"model.{name}": tensor.detach() for name, tensor in parameters.items()}
        state |= {f"optimizer.{name}": tensor.detach() for name, tensor in optimizer.items()}
        state[f"rng.{self.rank}"] = _pack(rng_state())
        state["progress"] = _pack({**progress, "step": step})
        writer = dcp.FileSystemWriter(draft, sync_files=True)
        with _quiet_dcp(), self.peers.waiting(f"writing checkpoint {final.name}"):
            dcp.save(state, storage_writer=writer, process_group=self.peers.group, no_dist=not self.distributed)
        self.peers.barrier(f"writing checkpoint {final.name}", patient=True)
        if self.rank == 0:
            manifest = {
                "format": FORMAT,
                "step": step,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "ranks": self.peers.world,
                "model": self.identity,
                "files": {
                    path.name: {"size": path.stat().st_size, "sha256": _digest(path)}
                    for path in sorted(draft.iterdir())
                },
            }
            manifest["sha256"] = _digest_of(manifest)
            _write_synced(draft / MANIFEST, json.dumps(manifest))
            _sync_folder(draft)
            _replace(draft, final)
            self._retain(step)
        self.peers.barrier(f"finishing checkpoint {final.name}", patient=True)
        return final

    def load(self, path: Path, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fills the given tensors in place from the checkpoint at `path`, sets the generators, returns ``progress``.

        `optimizer` tensors that the checkpoint lacks (their parameters were frozen then) are left as they are; a
        missing parameter is an error. Raises CheckpointError when the checkpoint is of another model.
        """
        check_model(path, self.identity)
        reader = dcp.FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        wanted = {f"model.{name}": tensor.detach() for name, tensor in parameters.items()}
        missing = [name for name in wanted if name not in stored]
        if missing:
            raise CheckpointError(f"{path}: holds no {missing[0]} ({len(missing)} parameters missing)")
        wanted |= {f"optimizer.{n}": t.detach() for n, t in optimizer.items() if f"optimizer.{n}" in stored}
        generators = f"rng.{self.rank}"
        for key in ("progress", generators):
            if key in stored:  # a rank that did not exist when this was saved keeps its freshly seeded generators
                wanted[key] = torch.empty(_size_of(stored[key]), dtype=torch.uint8)
        with _quiet_dcp(), self.peers.waiting(f"reading {path}"):
            dcp.load(wanted, storage_reader=reader, process_group=self.peers.group, no_dist=not self.distributed)
        if generators in wanted:
            set_rng_state(_unpack(wanted[generators]))
        progress: dict[str, Any] = _unpack(wanted["progress"])
        return progress

    def newest(self, at: Path | None = None) -> Path | None:
        """The newest checkpoint that passes verification (or `at`, verified), decided by rank 0 for all; None if none.

        Torn ones on the way are set aside, and a line on stderr names the file. A torn `at` raises.
        """
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                if at is not None:
                    if not at.is_dir():
                        raise CheckpointError(f"there is no checkpoint at {at}; found: {_listing(at.parent)}")
                    verify(at)
                    found[0] = at
                else:
                    found[0] = newest(self.folder)
            except CheckpointError as error:
                found[1] = str(error)
        self.peers.broadcast("choosing a checkpoint", found)
        if found[1] is not None:
            raise CheckpointError(found[1])
        path: Path | None = found[0]
        return path

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints later than `step` (a run that goes on from an earlier one leaves them behind)."""
        if self.rank == 0:
            for path in complete(self.folder):
                if step_of(path) > step:
                    _replace(path, path.with_name(path.name + SUPERSEDED))
        self.peers.barrier(f"going on from step {step}", patient=True)

    def _retain(self, step: int) -> None:
        older = [path for path in complete(self.folder) if step_of(path) <= step]
        for path in older[self.keep :]:
            shutil.rmtree(path)
        for ending in (TORN, SUPERSEDED):  # the newest is kept, in case somebody wants to look at it
            aside = [path for path in self.folder.glob(f"step-*{ending}") if path.is_dir()]
            for path in sorted(aside, key=lambda path: path.name)[:-1]:
                shutil.rmtree(path, ignore_errors=True)


def load_parameters(path: Path, model: nn.Module, identity: Mapping[str, Any]) -> int:
    """Fills a whole model in this one process from a checkpoint (for `generate`); returns the step."""
    check_model(path, identity)
    verify(path)
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    with _quiet_dcp():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return step_of(path)


def name_of(step: int) -> str:
    """``step-00000100``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, newest first (finished, not verified)."""
    paths = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit() and path.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint under `folder` that passes `verify`; torn ones are set aside and named on stderr."""
    restore(folder)
    for path in complete(folder):
        try:
            verify(path)
            return path
        except TornCheckpoint as torn:
            _replace(path, path.with_name(path.name + TORN))
            print(f"interlace: {torn}; using the checkpoint before it", file=sys.stderr, flush=True)
    return None


def restore(folder: Path) -> None:
    """Brings back a checkpoint that had stepped aside when its replacement was cut short, drops those replaced."""
    for old in folder.glob(f".step-*{_OLD}"):
        target = old.with_name(old.name[1 : -len(_OLD)])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises TornCheckpoint when there is none, or only a part of one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        whole = manifest.pop("sha256") == _digest_of(manifest)
    except FileNotFoundError:
        raise TornCheckpoint(f"checkpoint {path} is torn: {path / MANIFEST} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise TornCheckpoint(f"checkpoint {path} is torn: {path / MANIFEST} is damaged")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {manifest.get('format')}, this version reads {FORMAT}")
    return dict(manifest)


def verify(path: Path) -> None:
    """Checks that every file is there with the size and SHA-256 of the manifest. Raises TornCheckpoint naming it."""
    for name, entry in read_manifest(path)["files"].items():
        file = path / name
        if not file.exists():
            raise TornCheckpoint(f"checkpoint {path} is torn: {file} is missing")
        if file.stat().st_size != entry["size"]:
            raise TornCheckpoint(
                f"checkpoint {path} is torn: {file} has {file.stat().st_size} bytes instead of {entry['size']}"
            )
        if _digest(file) != entry["sha256"]:
            raise TornCheckpoint(f"checkpoint {path} is torn: the contents of {file} have changed (SHA-256)")


def check_model(path: Path, identity: Mapping[str, Any]) -> None:
    """Raises CheckpointError saying what differs when the checkpoint is of another model than `identity`."""
    saved = read_manifest(path)["model"]
    if saved["sha256"] != identity["sha256"]:
        what = "; ".join(differences(saved, identity))
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {what}. Use the config.toml of the run it comes from"
        )


def rng_state() -> dict[str, Any]:
    """The global generators of python, numpy and torch, as JSON-able values."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, numpy.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts back what `rng_state` returned (also after a trip through JSON)."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _size_of(stored: Any) -> torch.Size:
    size: torch.Size = stored.size
    return size


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _listing(folder: Path) -> str:
    return ", ".join(path.name for path in complete(folder)) or f"none in {folder}"


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()  # Python 3.10
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(source: Path, target: Path) -> None:
    """Renames a folder over another, which steps aside first; `restore` brings it back after a crash in between."""
    old = target.with_name(f".{target.name}{_OLD}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    source.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _quiet_dcp() -> Iterator[None]:
    """DCP warns that a single process saves without a process group; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint.*")
        yield


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _tensor(entry: Any) -> str:
    return "absent" if entry is None else f"{entry[1]}{entry[0]}"
