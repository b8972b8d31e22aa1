"""Self-check: before a process first uses a GPU kernel, its results are compared with the reference backend.

There is one small case per kind of kernel (`Kind`). It has FULL, PARTIAL and empty blocks, split rows, padding, NaN
keys that no query sees, a length that is no multiple of a block, and query heads that share a key head. Expected values
are computed on the CPU in fp64, from a plan that is built there, so the GPU's planner is checked too. Verdicts are
cached on disk per card, driver, versions and kernel sources. A failed kernel is tested again by the next process.

A kernel with wrong results raises RuntimeError. If Gluon was not requested by name, Triton replaces it, with a warning.
A kernel that does not finish within a minute raises RuntimeError. The case runs on the current stream and uses its own
random generator. No check is made during capture of a CUDA graph, since it would wait for the GPU.
INTERLACE_SELF_CHECK=0 in the environment turns all checks off.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import threading
import time
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from interlace import _device
from interlace._files import cache_folder, write_whole
from interlace.attention import gluon, reference, triton
from interlace.attention.backend import Attention
from interlace.attention.plan import AttentionPlan
from interlace.masks import BitfieldMask, word

log = logging.getLogger("interlace.attention")

DEVICES = {"cuda"}
"""Device types whose kernels are checked. Tests add "cpu", for Triton's interpreter."""

DIRECTIONS = {"forward": "forward", "backward": "backward", "atomic_backward": "backward with atomics"}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SOFTCAP = 2.0
CAP = 6  # blocks of one work item: the longest rows are split, and items outlast every pipeline of loads (4 stages)
LONGEST = 60.0  # seconds until a kernel counts as hung; a case normally takes milliseconds

_backends: dict[tuple[object, ...], ModuleType] = {}
_hung: dict[torch.device, str] = {}
_lock = threading.RLock()


class Kind(NamedTuple):
    """Key of a kernel variant. direction: the backend's function. mapped: the plan has bitmaps. tf32: fp32 in tf32."""

    language: str  # "triton" or "gluon"
    direction: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    block: int
    capped: bool
    mapped: bool
    tf32: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.language.capitalize()} {DIRECTIONS[self.direction]}"

    @property
    def shape(self) -> str:
        same = self.head_dim == self.value_dim
        text = f"head dimension {self.head_dim}" if same else f"head dimensions {self.head_dim} and {self.value_dim}"
        text = f"{'tf32' if self.tf32 else TYPES[self.dtype]}, {text}"
        text += "" if self.block == 128 else f", blocks of {self.block}"
        return text + (", softcap" if self.capped else "") + ("" if self.mapped else ", no bitmaps")

    @property
    def file(self) -> str:
        return "-".join(str(part) for part in self).replace("torch.", "") + ".json"


class Verdict(NamedTuple):
    """passed: every error is within its limit. result: the one with the largest error / limit, e.g. "dq"."""

    kernel: str
    shape: str
    passed: bool
    result: str
    error: float
    allowed: float


def checked(backend: ModuleType, direction: str, job: Attention, *, named: bool) -> ModuleType:
    """The backend to run `job` with: `backend` if its kernel is correct. named: the caller requested it by name."""
    q, plan = job.q, job.plan
    if q.device.type not in DEVICES:
        return backend
    key = (
        backend.__name__, direction, named, q.device, q.dtype, q.shape[3], job.v.shape[3], plan.block,
        job.softcap is None, plan.part_q_map.shape[0] > 0, q.dtype == torch.float32 and _tf32(),
    )  # fmt: skip
    cached = _backends.get(key)
    return cached if cached is not None else _check(key, backend, direction, job, named)


def _check(key: tuple[object, ...], backend: ModuleType, direction: str, job: Attention, named: bool) -> ModuleType:
    if backend not in (triton, gluon) or os.environ.get("INTERLACE_SELF_CHECK") == "0":
        _backends[key] = backend
        return backend
    if _capturing(job.q.device):
        return backend
    with _lock:
        if key in _backends:
            return _backends[key]
        if job.q.device in _hung:  # any wait on this device would hang
            raise RuntimeError(_hung[job.q.device])
        kind = kind_of(backend, direction, job)
        verdict = _verdict(backend, kind, job)
        if not verdict.passed:
            backend = _fallback(backend, kind, verdict, direction, job, named)
        _backends[key] = backend
        return backend


def _tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kind_of(backend: ModuleType, direction: str, job: Attention) -> Kind:
    is_gluon = backend is gluon and (direction == "forward" or gluon.unsupported_backward(job) is None)
    language = "gluon" if is_gluon else "triton"
    dims = (job.q.shape[3], job.v.shape[3])
    mapped, tf32 = job.plan.part_q_map.shape[0] > 0, job.q.dtype == torch.float32 and _tf32()
    return Kind(language, direction, job.q.dtype, *dims, job.plan.block, job.softcap is not None, mapped, tf32)


def _fallback(
    backend: ModuleType, kind: Kind, verdict: Verdict, direction: str, job: Attention, named: bool
) -> ModuleType:
    """A backend that replaces the wrong one. Raises RuntimeError if no correct backend is as fast."""
    alternative = '"triton" or "reference"' if kind.language == "gluon" else '"reference"'
    problem = (
        f"attention kernel {kind.kernel} is wrong on {card(job.q.device)} ({kind.shape}): {verdict.result} differs "
        f"from the reference by {verdict.error:.1e}, tolerance {verdict.allowed:.1e}"
    )
    report = "run `bash bench/gpu.sh first` and report its output"
    if kind.language == "gluon" and not named:
        warnings.warn(f'{problem}. backend="triton" is used instead; {report}', RuntimeWarning, stacklevel=5)
        return checked(triton, direction, job, named=False)
    raise RuntimeError(f"{problem}. Use backend={alternative} and {report}")


# ---------------------------------------------------------------------- the comparison


def compare(backend: ModuleType, kind: Kind, job: Attention) -> Verdict:
    """Run the small case of `kind` with `backend` on the device of `job`, in the layout of its tensors."""
    device = job.q.device
    with torch.no_grad(), torch.device("cpu"), torch.autocast(device.type, enabled=False):
        case, dout = _case(kind, job, torch.device("cpu"))
        exact = case._replace(q=case.q.double(), k=case.k.double(), v=case.v.double())
        ours, dout_there = _case(kind, job, device)
        out, lse = reference.forward(exact)
        names: tuple[str, ...]
        results: tuple[Tensor, ...]
        expected: tuple[Tensor, ...]
        if kind.direction == "forward":
            names, results, expected = ("out", "lse"), backend.forward(ours), (out, lse)
        else:
            out = out.to(kind.dtype)
            expected = reference.backward(exact, out, lse, dout.double(), None, False)
            arguments = (out.to(device), lse.float().to(device), dout_there, None, False)
            names, results = ("dq", "dk", "dv"), getattr(backend, kind.direction)(ours, *arguments)
        _await(kind, device)
        errors = [(name, _error(*pair), _allowed(name, kind)) for name, *pair in zip(names, results, expected)]
    name, error, allowed = max(errors, key=lambda entry: entry[1] / entry[2])
    return Verdict(kind.kernel, kind.shape, error <= allowed, name, error, allowed)


def _await(kind: Kind, device: torch.device) -> None:
    """Raises RuntimeError if a kernel hangs. A GPU is unusable after that, so there is no fallback.

    The wait does not include work queued earlier: building the plan of the case has already waited for it.
    """
    done, deadline = _device.done(device), time.monotonic() + LONGEST
    while not done():
        if time.monotonic() > deadline:
            alternative = '"triton"' if kind.language == "gluon" else '"reference"'
            _hung[device] = (
                f"attention kernel {kind.kernel} did not finish within {LONGEST:g} s on {card(device)} ({kind.shape}). "
                f"Restart with backend={alternative}; then run `bash bench/gpu.sh first` and report its output"
            )
            raise RuntimeError(_hung[device])
        time.sleep(1e-4)


def _case(kind: Kind, job: Attention, device: torch.device) -> tuple[Attention, Tensor]:
    """The small case, and a gradient of its output; the same values on every device.

    The strides are like those of `job`, so that exactly the kernels launched by `job` are compiled here. Heads are a
    slice of a tensor with as many heads as in `job`.
    """
    mask = _mask(kind.block)
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int, columns: int, like: Tensor) -> Tensor:
        by_token = like.stride(2) > like.stride(1)
        wide = max(heads, like.shape[1])
        shape = (2, mask.length, wide, columns) if by_token else (2, wide, mask.length, columns)
        values = torch.randn(shape, generator=generator).to(device, kind.dtype)
        return (values.transpose(1, 2) if by_token else values)[:, :heads]

    kv_heads = min(2, job.k.shape[1])
    q = tensor(2 * kv_heads, kind.head_dim, job.q)
    k, v = tensor(kv_heads, kind.head_dim, job.k), tensor(kv_heads, kind.value_dim, job.v)
    dout = torch.randn((*q.shape[:3], kind.value_dim), generator=generator).to(device, kind.dtype)
    plan = AttentionPlan.build(mask.to(device), block=kind.block, cap=CAP)
    if not kind.mapped:
        plan = replace(plan, part_q_map=plan.part_q_map[:0], part_k_map=plan.part_k_map[:0])
    for x in (k, v):  # unused keys may have any value
        x.masked_fill_((plan.k_doc < 0)[:, None, :, None], torch.nan)
    return Attention(q, k, v, plan, kind.head_dim**-0.5, SOFTCAP if kind.capped else None), dout


def _mask(block: int) -> BitfieldMask:
    """Two causal rows of about 7 1/3 blocks, with queries that see nothing. In the second row one block is padding."""
    length = 7 * block + block * 11 // 32  # 940 with blocks of 128
    bits = torch.full((2, length), word(0, [0], causal=True))
    bits[:, 2 * block + 2 : 2 * block + 4] = word(3, [5])
    doc = torch.zeros(2, length, dtype=torch.int32)
    doc[1, block : 2 * block] = -1
    return BitfieldMask(bits, doc=doc)


def _error(result: Tensor, expected: Tensor) -> float:
    """The largest error of a row, relative to the larger of the row's norm and the average norm.

    Infinite if `result` has NaN, or infinities in other positions than `expected`.
    """
    result, expected = (x.detach().cpu().double() for x in (result, expected))
    if result.shape != expected.shape or result.isnan().any() or not torch.equal(result.isinf(), expected.isinf()):
        return float("inf")
    result, expected = (
        x.masked_fill(x.isinf(), 0.0).flatten(0, 2).view(-1, x[0, 0, 0].numel()) for x in (result, expected)
    )
    sizes = expected.norm(dim=1)
    return float(((result - expected).norm(dim=1) / sizes.clamp_min(float(sizes.mean()))).max())


def _allowed(name: str, kind: Kind) -> float:
    """The limit of `_error`."""
    if kind.tf32:  # hardware truncates inputs, so the gradient of a query that sees one key is not exactly 0
        return 2e-3 if name == "lse" else 2**-4
    if kind.dtype == torch.float32:
        return 1e-5 if name == "lse" else 3e-5
    return 2e-3 if name == "lse" else 2 * torch.finfo(kind.dtype).eps


# ---------------------------------------------------------------------- verdicts on disk


def _verdict(backend: ModuleType, kind: Kind, job: Attention) -> Verdict:
    """Verdict from the cache if the kernel passed there, otherwise from a new comparison, which is cached."""
    file = folder(job.q.device) / kind.file
    cached = _read(file)
    if cached is not None and cached.passed:
        return cached
    verdict = compare(backend, kind, job)
    relation = "equals" if verdict.passed else "DIFFERS FROM"
    log.info("%s on %s, %s: %s the reference", kind.kernel, card(job.q.device), kind.shape, relation)
    with contextlib.suppress(OSError):  # if the cache is not writable, the next process repeats the check
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(verdict._asdict()))
    return verdict


def _read(file: Path) -> Verdict | None:
    try:
        verdict = Verdict(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # missing or damaged
        return None
    return verdict if isinstance(verdict.passed, bool) else None


def verdicts(device: torch.device) -> list[Verdict]:
    """Cached verdicts of this card for the current driver, versions and sources."""
    files = sorted(folder(device).glob("*.json"))
    return [verdict for file in files if (verdict := _read(file)) is not None]


def folder(device: torch.device) -> Path:
    """Folder of verdicts: one per card, driver, version of torch and Triton, and sources of the kernels."""
    about = (card(device), _driver(), torch.__version__, torch.version.cuda, *_sources())
    return cache_folder() / "self-checks" / hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


@cache
def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:  # not on Linux, or hidden in a container
        return ""


@cache
def _sources() -> tuple[str, ...]:
    """Triton's version, and a hash of everything that results depend on."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(file for part in ("attention", "kernels") for file in (package / part).glob("*.py")):
        digest.update(file.read_bytes())
    return str(importlib.import_module("triton").__version__), digest.hexdigest()
