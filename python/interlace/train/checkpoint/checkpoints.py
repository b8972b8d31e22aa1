"""Checkpoints: tensors keyed by global parameter name, written atomically, verified before use.

A checkpoint is a folder ``step-00000100`` with one file per rank and ``manifest.json``. `storage` describes the files
and their safety (no pickle). Its keys:

    model.<FQN>                        every parameter under its name in the one-process model, except frozen ones
                                       that are stored in a folder of weights (`base`)
    optimizer.{exp_avg,exp_avg_sq,step,ema}.<FQN>
    rng.<rank>                         python, numpy and torch generators of that rank, of its GPU too (JSON as bytes)
    progress                           step, dataloader state, counters (JSON as bytes), the same on all ranks

Except for the generators, a checkpoint does not depend on stages or ranks. A run may resume under another placement or
another number of ranks; under the same one it resumes bit for bit. A tensor that several ranks hold is written by one
of them. A rank with a part (`pieces.Piece`) reads only its own rows.

Writing: all ranks write into a draft, ``.step-00000100.<nonce>.tmp``, which is unique to the job, and send the size and
SHA-256 of their files to rank 0. Rank 0 reads all files back, so that a missing or different file (a folder that is not
shared) is an error. It writes the manifest, syncs the files and folders to disk and, if the run still has the lock,
renames the folder. A folder without ``.tmp`` is therefore complete, unless the disk lost data afterwards. `newest`
verifies sizes and checksums, names the torn file, sets that checkpoint aside (``.torn``) and takes the previous one.

The tensors are copied first, so training continues while a thread of each rank writes; then rank 0 reads back in a
thread. Ranks exchange the messages in between during their regular communication (`ready`, `advance`). A checkpoint
that is written again is first renamed to ``.step-00000100.old``, until the new one takes its name. After an
interruption in between, the old one is restored. If any part fails on any rank, all ranks end with its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.train.checkpoint.base import Stored, base_of, prints_of
from interlace.train.checkpoint.folder import (
    LATE_SECONDS,
    SUPERSEDED,
    TORN,
    complete,
    listing,
    name_of,
    newest,
    replace,
    restore,
    step_of,
    verify,
    wait_until_visible,
)
from interlace.train.checkpoint.generators import rng_state, set_rng_state
from interlace.train.checkpoint.identity import differences
from interlace.train.checkpoint.pieces import Part, Piece, parts_of, shared_out
from interlace.train.checkpoint.reading import read_base, read_into
from interlace.train.checkpoint.storage import (
    MANIFEST,
    BaseWeight,
    CheckpointError,
    File,
    Manifest,
    digest,
    dump_manifest,
    make_manifest,
    read_chunk,
    read_manifest,
    sync_folder,
    write_synced,
    write_tensors,
)
from interlace.train.errors import TrainingError
from interlace.train.launch.peers import Peers

if TYPE_CHECKING:
    from interlace.train.models.pretrained import Source

AVERAGE = "ema"
SLOWEST_DISK = 20e6  # bytes per second: determines how long ranks wait before one is considered lost
SHARE = "all ranks must share the run folder: put run.folder on a file system that all nodes share"

Values = Mapping[str, Tensor | Piece]
"""Tensors by name; those that a rank holds only in part are pieces."""
# Of one rank, as JSON: its host, the name of its file and its `File`, and by key a `Stored` with the chunks in it.
_Written = tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]


class _Writing(NamedTuple):
    """A checkpoint in progress. work: of this rank. written: entries of all ranks, once rank 0 reads them back."""

    step: int
    draft: Path
    work: Future[Any]
    written: list[_Written] | None


def seconds_to_write(identity: Mapping[str, Any]) -> float:
    """Time limit of a checkpoint: weights and two moments of every parameter, in 4 bytes each, and a late file."""
    return LATE_SECONDS + sum(12.0 * math.prod(shape) for shape, _ in identity["parameters"].values()) / SLOWEST_DISK


class Checkpoints:
    """The checkpoints of one run, on one rank; all ranks make the same calls in the same order.

    `folder` is shared by all ranks. `keep` is the number of complete checkpoints to keep. `identity` is the model's
    (`identity_of`), `peers` the other ranks. `check` raises if another job has taken over the run folder: rank 0 calls
    it before it changes visible files. A rank that does not respond is a TrainingError that names it.

    `stored` returns the locations of the weights at the start of the run, and `frozen` names the frozen ones: weights
    in both are not written. Raises CheckpointError on every rank if the weights of one rank differ from those of rank
    0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        identity: Mapping[str, Any],
        peers: Peers | None = None,
        check: Callable[[], None] = lambda: None,
        stored: Stored = dict,
        frozen: Collection[str] = (),
    ) -> None:
        self.folder, self.keep, self.identity, self.check = Path(folder), keep, identity, check
        self.peers = peers or Peers(60.0, allowance=seconds_to_write(identity))
        self.rank = self.peers.rank
        self.best = -1  # step of the checkpoint that is kept; -1: none
        self._writing: _Writing | None = None
        self._stored = stored
        self.base = self._base_of(frozen) if frozen else {}

    def _base_of(self, frozen: Collection[str]) -> dict[str, BaseWeight]:
        """Weights of `frozen` that are stored in folders, with their prints; the same on every rank. Collective, if
        there are any."""
        sources = {name: source for name, source in self._stored().items() if name in frozen}
        if not sources:
            return {}
        base: dict[str, BaseWeight] = {}

        def read() -> str:
            base.update(prints_of(sources))
            return hashlib.sha256("".join(weight.sha256 for weight in base.values()).encode()).hexdigest()

        prints = self.peers.together("reading the frozen weights", read, expected=CheckpointError)
        if others := [rank for rank, theirs in enumerate(prints) if theirs != prints[0]]:
            folder = next(iter(base.values())).folder
            raise CheckpointError(
                f"ranks {others} read different frozen weights from {folder} than rank 0: give all "
                "ranks the same folder"
            )
        return base

    def save(
        self, step: int, parameters: Values, optimizer: Values, progress: Mapping[str, object], *, best: int = -1
    ) -> Path:
        """Writes this rank's `parameters` (by FQN) and `optimizer` tensors (``exp_avg.<FQN>`` ...) with the rest.

        A tensor that a rank holds only in part is a `Piece`. Ranks may hold the same pieces or different ones.

        Returns the finished folder. Raises TrainingError on every rank if anything fails on any rank (a full disk
        leaves only a draft).
        """
        self.begin(step, parameters, optimizer, progress, copy=False, best=best)
        self.finish()
        return self.folder / name_of(step)

    def begin(
        self,
        step: int,
        parameters: Values,
        optimizer: Values,
        progress: Mapping[str, object],
        *,
        copy: bool = True,
        best: int = -1,
    ) -> None:
        """Begins a `save` and returns as soon as the tensors are copied to host memory and may change again.

        A checkpoint that is still being written is finished first. `advance`, when every rank is `ready`, or `finish`
        complete the work and raise its errors. Without `copy` the tensors must not change until then. The checkpoint of
        step `best` is kept beside the newest ones.
        """
        self.finish()
        self.best = best
        final = name_of(step)
        draft = self.folder / self.peers.on_first(f"beginning checkpoint {final}", lambda: self._begin(final))
        state = {f"model.{name}": tensor for name, tensor in parameters.items() if name not in self.base}
        state |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
        state[f"rng.{self.rank}"] = _pack(rng_state())
        state["progress"] = _pack({**progress, "step": step})
        held: dict[str, Part] = {}

        def list_parts() -> dict[str, int]:
            held.update((part.entry, part) for part in parts_of(state))
            return {entry: part.tensor.nbytes for entry, part in held.items()}

        mine = shared_out(self.peers.together(f"sharing out checkpoint {final}", list_parts))[self.rank]
        parts = [part for entry, part in held.items() if entry in mine]
        if copy:
            parts = [part._replace(tensor=part.tensor.to("cpu", copy=True)) for part in parts]
        work = in_background(lambda: self._write(draft, parts))
        self._writing = _Writing(step, draft, work, None)

    @property
    def writing(self) -> bool:
        """True if a checkpoint was begun and is not finished: the same on every rank."""
        return self._writing is not None

    @property
    def ready(self) -> bool:
        """True if `advance` would not wait for this rank's own work."""
        return self._writing is not None and self._writing.work.done()

    def advance(self) -> None:
        """Runs the next part of the checkpoint in progress, and waits for the present one. Collective.

        Raises TrainingError on every rank if it failed on any rank; the checkpoint is then aborted.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        final = name_of(writing.step)
        if writing.written is None:
            written = self.peers.together(f"writing checkpoint {final}", writing.work.result)
            first = self.rank == 0
            work = in_background(lambda: self._finish(writing.step, writing.draft, written) if first else None)
            self._writing = _Writing(writing.step, writing.draft, work, written)
        else:
            self.peers.on_first(f"finishing checkpoint {final}", writing.work.result)

    def finish(self) -> None:
        """Waits until the checkpoint in progress is finished. Collective; errors as in `advance`."""
        while self.writing:
            self.advance()

    def load(self, path: Path, parameters: Values, optimizer: Values) -> dict[str, Any]:
        """Fills the given tensors in place from the checkpoint at `path`, sets the generators, returns ``progress``.

        Reads only the parts that this rank holds, independent of the cut of the ranks that wrote the files. The same
        holds for weights that the checkpoint leaves to folders. Frozen weights that are stored in this checkpoint are
        stored in later ones, too.

        `optimizer` tensors that the checkpoint lacks (their parameters were frozen then) are left unchanged; a missing
        parameter is an error. Raises CheckpointError if the checkpoint is of another model.
        """
        progress: dict[str, Any] = {}
        base: dict[str, Source] = {}

        def read() -> str:
            manifest = check_model(path, self.identity)
            base.update(base_of(path, manifest, self._stored, self.base))
            wanted = {f"model.{name}": tensor for name, tensor in parameters.items() if name not in base}
            missing = [name for name in wanted if name not in manifest.tensors]
            if missing:
                raise CheckpointError(f"{path}: holds no {missing[0]} ({len(missing)} parameters missing)")
            moments = {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
            wanted |= {key: tensor for key, tensor in moments.items() if key in manifest.tensors}
            read_into(path, manifest, wanted)
            read_base({name: tensor for name, tensor in parameters.items() if name in base}, base)
            progress.update(read_json(path, manifest, "progress"))
            if progress.get("step") != manifest.step:
                raise CheckpointError(
                    f"{path}: its progress has step {progress.get('step')!r}, its manifest {manifest.step}"
                )
            if f"rng.{self.rank}" in manifest.tensors:  # a rank that did not exist then keeps its freshly seeded ones
                try:
                    set_rng_state(read_json(path, manifest, f"rng.{self.rank}"))
                except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
                    raise CheckpointError(
                        f"{path}: rng.{self.rank} is not a valid state of the random generators: {error}"
                    ) from None
            return digest(path / MANIFEST)

        digests = self.peers.together(f"reading {path}", read, expected=CheckpointError)
        others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if others:
            raise CheckpointError(
                f"{path} differs between rank 0 and ranks {others}: put run.folder on a shared file system"
            )
        self.base = {name: weight for name, weight in self.base.items() if name in base}
        return progress

    def newest(self, at: Path | None = None) -> Path | None:
        """The newest checkpoint that passes verification (or `at`, verified), decided by rank 0 for all; None if none.

        Torn checkpoints found on the way are set aside, and a line on stderr names the file. A torn `at` raises.
        """

        def choose() -> str | None:
            self.check()
            if at is None:
                checkpoint = newest(self.folder, repair=True)
                return None if checkpoint is None else str(checkpoint)
            if not at.is_dir():
                raise CheckpointError(f"there is no checkpoint at {at}; found: {listing(at.parent)}")
            verify(at)
            return str(at)

        chosen = self.peers.on_first("choosing a checkpoint", choose, expected=CheckpointError)
        return None if chosen is None else Path(chosen)

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints later than `step`, if a run resumes from an earlier one."""

        def set_aside() -> None:
            self.check()
            for path in complete(self.folder):
                if step_of(path) > step:
                    replace(path, path.with_name(path.name + SUPERSEDED))

        self.peers.on_first(f"going on from step {step}", set_aside)

    def _begin(self, final: str) -> str:
        """Rank 0: makes the draft of a checkpoint, and returns its name."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # NFS keeps files that another process has open
        restore(self.folder)
        draft = self.folder / f".{final}.{secrets.token_hex(8)}.tmp"
        draft.mkdir()
        return draft.name

    def _write(self, draft: Path, parts: Sequence[Part]) -> _Written:
        """Writes this rank's share of the tensors; returns its entries for the manifest."""
        if not wait_until_visible(draft):
            raise TrainingError(f"rank {self.rank} on {platform.node()} does not see {draft}, made by rank 0; {SHARE}")
        name = f"rank-{self.rank:05d}.safetensors"
        file, begins = write_tensors(draft / name, {part.entry: part.tensor for part in parts})
        tensors: dict[str, dict[str, Any]] = {}
        for part in parts:
            box = {"offsets": part.offsets, "sizes": list(part.tensor.shape)}
            stored = tensors.setdefault(part.key, {"dtype": part.dtype, "shape": part.shape, "chunks": []})
            stored["chunks"].append({**box, "file": name, "begin": begins[part.entry]})
        return platform.node(), name, file.model_dump(), tensors

    def _finish(self, step: int, draft: Path, written: Sequence[_Written]) -> None:
        """Rank 0: verifies the files of all ranks, writes the manifest, makes the checkpoint visible."""
        deadline = time.monotonic() + LATE_SECONDS
        tensors: dict[str, dict[str, Any]] = {}
        for rank, (host, name, entry, own) in enumerate(written):
            file = File.model_validate(entry)
            if not wait_until_visible(draft / name, file.size, deadline):
                raise TrainingError(f"rank 0 does not see {draft / name}, which rank {rank} wrote on {host}; {SHARE}")
            if digest(draft / name) != file.sha256:
                raise TrainingError(
                    f"rank 0 reads other contents from {draft / name} than rank {rank} wrote on {host}; {SHARE}"
                )
            for key, stored in own.items():
                tensors.setdefault(key, {**stored, "chunks": []})["chunks"] += stored["chunks"]
        manifest = make_manifest(
            step=step,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            ranks=self.peers.world,
            model=self.identity,
            files={name: entry for _, name, entry, _ in written},
            tensors=tensors,
            base={name: weight.model_dump() for name, weight in self.base.items()},
        )
        write_synced(draft / MANIFEST, dump_manifest(manifest))
        sync_folder(draft)
        self.check()
        replace(draft, self.folder / name_of(step))
        self._retain(step)

    def _retain(self, step: int) -> None:
        older = [path for path in complete(self.folder) if step_of(path) <= step]
        for path in older[self.keep :]:
            if step_of(path) == self.best:
                continue
            shutil.rmtree(path, ignore_errors=True)  # the new one is complete: a failed removal must not end the run
        for ending in (TORN, SUPERSEDED):  # the newest is kept for inspection
            aside = [path for path in self.folder.glob(f"step-*{ending}") if path.is_dir()]
            for path in sorted(aside, key=lambda path: path.name)[:-1]:
                shutil.rmtree(path, ignore_errors=True)


def load_parameters(
    path: Path, model: nn.Module, identity: Mapping[str, Any], *, averaged: bool = False, stored: Stored = dict
) -> int:
    """Fills a whole model in this one process from a checkpoint (for `generate`); returns the step.

    averaged: use the averages of trained weights, if the checkpoint has them.
    stored: locations of weights that it does not hold.
    """
    manifest = check_model(path, identity)
    verify(path)
    base = base_of(path, manifest, stored)
    wanted = {}
    for name, parameter in model.named_parameters():
        average = f"optimizer.{AVERAGE}.{name}"
        if averaged and average in manifest.tensors:
            wanted[average] = parameter.detach()
        elif name not in base:
            wanted[f"model.{name}"] = parameter.detach()
    read_into(path, manifest, wanted)
    read_base({name: parameter.detach() for name, parameter in model.named_parameters() if name in base}, base)
    return manifest.step


def check_model(path: Path, identity: Mapping[str, Any]) -> Manifest:
    """The manifest. Raises CheckpointError with the differences if it is of another model than `identity`."""
    manifest = read_manifest(path)
    if manifest.model.sha256 != identity["sha256"]:
        what = "; ".join(differences(manifest.model.model_dump(mode="json"), identity))
        raise CheckpointError(f"{path} is a checkpoint of another model: {what}. Use the config.toml of its run")
    return manifest


def read_json(path: Path, manifest: Manifest, key: str) -> Any:
    """JSON value of a checkpoint under `key`, unchecked."""
    stored = manifest.tensors.get(key)
    if stored is None or stored.dtype != "U8" or len(stored.shape) != 1 or len(stored.chunks) != 1:
        raise CheckpointError(f"{path}: holds no {key}")
    try:
        return json.loads(read_chunk(path, stored, stored.chunks[0]).numpy().tobytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: {key} is not valid JSON") from None


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # passed on to the reader of the result
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _pack(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
