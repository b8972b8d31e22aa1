"""Decodes every file of one modality once, finds the broken ones, and keeps the results for fast reading.

One pass does two jobs. It *verifies*: a file that fails is known by name and reason before the first step, on every
rank, so the sample sequence never depends on which rank decodes. And it *caches*: resized pixels (uint8) and mel
features (float16) go to flat files, so training decodes nothing.

- Workers are separate Python processes, not forks: a decoder that crashes or hangs costs that file,
  not the run, and torch's threads are never forked.
- A pack is keyed by the files, the specification and the decoder versions; it is built under a lock, moved into place
  whole, checked by size when opened and by CRC when read. A damaged pack is rebuilt, a damaged item decoded afresh.
- Read by plain reads: a file that is cut short under a memory map would kill the process.
- Bounded: past ``limit_bytes`` items are verified but not kept; the 6 packs used last per modality stay on disk.

For the real package (7,171 clips, 1,033 pictures) that costs 50 s of processor time, shared by the cores, and 190 MB;
opening it again 0.03 s.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from interlace.data.fetch import exclusive
from interlace.data.media import (
    AudioSpec,
    DecodeError,
    ImageSpec,
    decode_audio,
    decode_image,
    decoder_versions,
    modality_of,
)

FORMAT = 1
KEPT_PACKS = 6
ITEM_TIMEOUT = 60.0  # seconds without a finished item before a worker counts as hung
START_TIMEOUT = 300.0  # seconds to import the decoders, on a loaded machine
IN_PROCESS_ITEMS = 150  # fewer are decoded here: starting workers costs seconds
log = logging.getLogger("interlace.data")

Spec = ImageSpec | AudioSpec
Item = tuple[str, tuple[int, ...]]  # path relative to the root, shape that its header promises


@dataclass
class Pack:
    """Decoded items of one modality. ``failures``: relative path -> reason; ``entries``: path -> where it lies."""

    folder: Path
    root: Path
    spec: Spec
    shapes: dict[str, tuple[int, ...]]
    entries: dict[str, tuple[int, int, int]]  # file number, offset (-1: not kept), CRC
    failures: dict[str, str]
    _files: dict[int, IO[bytes]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files stay with the process: data workers get none

    def read(self, path: str) -> np.ndarray:
        """The decoded item: uint8 [3, H, W] or float16 [mel_bins, frames]. Raises DecodeError, KeyError."""
        number, offset, crc = self.entries[path]
        shape = self.shapes[path]
        if offset >= 0:
            dtype = np.dtype(np.float16 if isinstance(self.spec, AudioSpec) else np.uint8)
            size = int(np.prod(shape)) * dtype.itemsize
            raw = np.empty(size, dtype=np.uint8)
            try:
                file = self._files.get(number)
                if file is None:  # threads may open it at once: all take the first one's
                    file = self._files.setdefault(number, open(self.folder / f"part{number}.bin", "rb", buffering=0))
                whole = os.preadv(file.fileno(), [raw.data], offset) == size
            except OSError:
                whole = False
            if whole and zlib.crc32(raw.data) == crc:
                return raw.view(dtype).reshape(shape)
            log.warning("%s: its cached copy in %s is damaged; decoding the file again", path, self.folder)
            self.entries[path] = (number, -1, crc)
        return decode_item(self.root, (path, shape), self.spec)


def decode_item(root: Path, item: Item, spec: Spec) -> np.ndarray:
    """Decodes one file and checks it against the shape its header promised. Raises DecodeError."""
    path, shape = item
    if isinstance(spec, AudioSpec):
        array = decode_audio(root / path, spec)
    else:
        array = decode_image(root / path, (shape[0], shape[1], shape[2]))
    if array.shape != shape:
        raise DecodeError(f"{root / path}: decodes to shape {array.shape}, its header promises {shape}")
    return array


def open_pack(
    root: Path,
    items: Sequence[Item],
    spec: Spec,
    cache: Path,
    *,
    signature: str = "",
    workers: int | None = None,
    limit_bytes: int = 2 << 30,
    timeout: float = 1800.0,
) -> Pack:
    """The pack of ``items`` under ``cache / "packs"``, built first if it is not there.

    ``signature``: of the files (StampIndex.signature). ``workers``: processes, 0 = decode in this one, None = by
    the number of items and cores. ``timeout``: seconds to wait for another process that builds it. Raises
    ImportError when a decoder library is missing, RuntimeError when workers cannot start.
    """
    modality = modality_of(spec)
    key = [FORMAT, signature, modality, asdict(spec), decoder_versions(modality), sorted(items), limit_bytes]
    name = f"{modality}-{sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    folder = cache / "packs" / name
    pack = _load(folder, root, spec)
    if pack is None:
        with exclusive(cache / "packs" / f"{name}.lock", timeout):
            pack = _load(folder, root, spec)
            if pack is None:
                _build(folder, root, items, spec, workers, limit_bytes)
                pack = _load(folder, root, spec)
                _prune(cache / "packs", modality)
        if pack is None:
            raise RuntimeError(f"{folder}: just written and already unreadable; check the disk")
    return pack


def _load(folder: Path, root: Path, spec: Spec) -> Pack | None:
    try:
        record = json.loads((folder / "pack.json").read_text(encoding="utf-8"))
        for part, size in record["parts"].items():
            if (folder / part).stat().st_size != size:
                log.warning("%s: %s is damaged (wrong size); building it again", folder, part)
                return None
        shapes = {path: tuple(shape) for path, shape, *_ in record["items"]}
        entries = {path: (number, offset, crc) for path, _, number, offset, crc in record["items"]}
        os.utime(folder)  # used now: pruning goes by this time
        return Pack(folder, root, spec, shapes, entries, record["failures"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        log.warning("%s: pack.json is damaged; building it again", folder)
        return None


def _build(folder: Path, root: Path, items: Sequence[Item], spec: Spec, workers: int | None, limit: int) -> None:
    started = time.monotonic()
    if workers is None:
        workers = 0 if len(items) < IN_PROCESS_ITEMS else min(16, _cores())
    for stale in folder.parent.glob(f".tmp-{folder.name}-*"):  # of a killed process: the lock says none is at work
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    kind = "clips" if isinstance(spec, AudioSpec) else "pictures"
    if workers:
        log.info("decoding %d %s once (%d processes; kept for later runs)", len(items), kind, workers)
    try:
        results: list[dict[str, Any]] = []
        if workers == 0:
            with open(temporary / "part0.bin", "wb") as out:
                results = [_process(root, item, spec, out, limit) | {"part": 0} for item in items]
        else:
            results = _run_workers(temporary, root, items, spec, workers, limit // workers)
        done = {r["path"]: r for r in results}
        good = [(i, done[i[0]]) for i in items if "error" not in done[i[0]]]
        failures = {r["path"]: r["error"] for r in results if "error" in r}
        record = {
            "parts": {p.name: p.stat().st_size for p in sorted(temporary.glob("part*.bin"))},
            "items": [[path, shape, r["part"], r["offset"], r["crc"]] for (path, shape), r in good],
            "failures": failures,
        }
        (temporary / "pack.json").write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("decoded %d %s in %.1f s, %d failed", len(items), kind, time.monotonic() - started, len(failures))


def _cores() -> int:
    """Cores that this process may use; fewer than the machine has in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prune(packs: Path, modality: str) -> None:
    """Removes the packs used longest ago. A process that has one open keeps its data until it closes it."""
    folders = sorted(packs.glob(f"{modality}-*/"), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in folders[KEPT_PACKS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _process(root: Path, item: Item, spec: Spec, out: IO[bytes], limit: int) -> dict[str, Any]:
    path = item[0]
    try:
        array = decode_item(root, item, spec)
    except (DecodeError, MemoryError) as error:
        return {"path": path, "error": str(error).replace(f"{root / path}: ", "").replace(str(root), "") or repr(error)}
    offset = out.tell()
    if offset + array.nbytes > limit:
        offset = -1
    else:
        out.write(array.tobytes())
    return {"path": path, "offset": offset, "crc": zlib.crc32(array.tobytes())}


# --- workers ----------------------------------------------------------------------------------------------


def _run_workers(
    folder: Path, root: Path, items: Sequence[Item], spec: Spec, workers: int, limit: int
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    errors: list[BaseException] = []

    def supervise(number: int) -> None:
        try:
            share = list(items[number::workers])
            while share:  # a worker that dies or hangs is replaced; the item it held counts as failed
                finished, cause = _one_worker(folder, number, root, share, spec, limit)
                results.extend(r | {"part": number} for r in finished)
                share = share[len(finished) :]
                if share:
                    results.append({"path": share[0][0], "error": f"the decoder {cause}", "part": number})
                    share = share[1:]
        except BaseException as error:  # handed to the caller's thread below
            errors.append(error)

    threads = [threading.Thread(target=supervise, args=(n,), daemon=True) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _one_worker(
    folder: Path, number: int, root: Path, items: list[Item], spec: Spec, limit: int
) -> tuple[list[dict[str, Any]], str]:
    """Runs one worker over ``items``; returns what it finished and, when that is not all, what became of it."""
    package_parent = str(Path(__file__).resolve().parents[2])
    job = {"root": str(root), "kind": type(spec).__name__, "spec": asdict(spec), "items": items, "limit": limit}
    job_file = folder / f"job{number}.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
    }
    program = "import sys; from interlace.data.pack import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, str(job_file), str(folder / f"part{number}.bin")]
    with open(folder / f"log{number}.txt", "wb") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def pump(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=pump, args=(process.stdout,), daemon=True)
    reader.start()
    finished: list[dict[str, Any]] = []
    ready, cause = False, ""
    try:
        while len(finished) < len(items):
            try:
                line = lines.get(timeout=ITEM_TIMEOUT if ready else START_TIMEOUT)
            except queue.Empty:
                cause = f"did not finish within {ITEM_TIMEOUT:g} s"
                break
            if line is None:
                process.wait()
                cause = f"crashed (exit status {process.returncode})"
                break
            if not ready:
                ready = line.strip() == "ready"  # anything before it is some library's chatter
                continue
            try:
                finished.append(json.loads(line))
            except ValueError:
                continue
    finally:
        if cause or len(finished) < len(items):
            process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        job_file.unlink(missing_ok=True)
    if not ready:
        tail = (folder / f"log{number}.txt").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"the decoding worker {cause}: {tail[-1] if tail else 'no message'}")
    return finished, cause


def main(arguments: Sequence[str]) -> None:
    """Worker: decodes the items of a job file, appends arrays to a part file, writes one JSON line per item."""
    job_file, part = arguments
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    spec = {"ImageSpec": ImageSpec, "AudioSpec": AudioSpec}[job["kind"]](**job["spec"])
    decoder_versions(modality_of(spec))
    print("ready", flush=True)
    with open(part, "ab", buffering=0) as out:  # unbuffered: what a line reports is in the file
        out.seek(0, os.SEEK_END)
        for path, shape in job["items"]:
            print(json.dumps(_process(Path(job["root"]), (path, tuple(shape)), spec, out, job["limit"])), flush=True)
