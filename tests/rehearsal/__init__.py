"""Rehearsal device: a GPU that is not there, for tests that only ask whether the code is ready for one.

`start()` makes torch's accelerator a device "rehearsal" whose memory is the host's (`device.cpp`). Operators run in
torch's CPU kernels. As on CUDA, tensors of several devices in one operator raise, and NumPy refuses a tensor of the
device. `record()` lists what would be noticed on a GPU:

    read    a value, or a shape that follows from values, is read on the host: the program waits for the GPU
    upload  a copy to the device from memory that is not pinned, or that is not `non_blocking`: the program waits
    wait    a stream, an event or the device is waited for
    stream, event    one is made

It does not show: kernels and their numerics, times, the order of work on several streams (all runs at once), NCCL, IPC,
memory limits, CUDA graphs, torch.compile.

A process has one accelerator, so that a rehearsal is a process of its own (`run`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from interlace import _device

ROOT = Path(__file__).parents[2]
PACKAGE = str(ROOT / "python" / "interlace") + os.sep
SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "device.h")]
NAME = "rehearsal"
MEMORY = 1 << 34  # bytes that a device says it has

Seen = tuple[str, str, str]
"""Kind and name of what was noticed, and file:line:function of the innermost frame of the package."""

_seen: list[Seen] = []
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


def start() -> None:
    """Makes "rehearsal" the accelerator of this process. Compiles the device at first use, for about 15 s."""
    if _device.KIND == NAME:
        return
    torch.ops.load_library(library())
    ctypes.CDLL(str(library())).rehearsal_start(_listen)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    # Between CUDA and the CPU, Module.to keeps parameters and so their ties; of other devices it makes new ones.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _device.KIND = NAME


def library() -> Path:
    """The compiled device, in a cache by its source and torch's version."""
    import torch.utils.cpp_extension as extension

    text = b"".join(source.read_bytes() for source in SOURCES) + torch.__version__.encode()
    folder = Path(tempfile.gettempdir()) / f"interlace-rehearsal-{os.getuid()}"
    built = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(exist_ok=True)
        new = built.with_suffix(f".{os.getpid()}")
        include = [f"-isystem{path}" for path in extension.include_paths()]
        link = [f"-L{path}" for path in extension.library_paths()]
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared"]
        libraries = ["-ltorch_cpu", "-ltorch", "-lc10"]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, *include, str(SOURCES[0]), "-o", str(new), *link, *libraries], check=True)
        new.replace(built)
    return built


@contextmanager
def record() -> Iterator[list[Seen]]:
    """What is noticed inside, of all threads; the list is filled at the end."""
    result: list[Seen] = []
    begin = len(_seen)
    try:
        yield result
    finally:
        result += _seen[begin:]


def run(script: str, *arguments: str) -> Any:
    """What a rehearsal script of this folder prints as its last line, as JSON; it runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.rehearsal.{script}", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


def table(seen: Iterable[Seen]) -> dict[str, int]:
    """How often each was noticed, by "kind name place": place without the line, as lines move."""
    return dict(sorted(Counter(f"{kind} {what} {re.sub(r':[0-9]+', '', place)}" for kind, what, place in seen).items()))


@_LISTENER
def _listen(kind: bytes, what: bytes) -> None:
    _seen.append((kind.decode(), what.decode(), _place(sys._getframe().f_back)))


def _place(frame: FrameType | None) -> str:
    """file:line:function of the innermost frame of the package, else of the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    if innermost is None:
        return "torch's backward"
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}:{innermost.f_code.co_name}"


def _device_module() -> ModuleType:
    """torch.rehearsal: of torch.cuda, what torch asks the module of a backend for."""
    module, own = ModuleType(f"torch.{NAME}"), torch.ops.rehearsal

    def index(device: Any) -> int:
        result = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if result is None else result

    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: own.devices(),
        device=lambda device: torch.accelerator.device_index(index(device)),
        current_device=torch.accelerator.current_device_index,
        Event=partial(torch.Event, NAME),
        get_device_name=lambda device=None: NAME,
        get_device_properties=lambda device=None: SimpleNamespace(name=NAME, total_memory=MEMORY),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: own.rng_state(index(device)),
        set_rng_state=lambda state, device=None: own.set_rng_state(index(device), state),
        manual_seed_all=lambda seed: [own.seed(device, seed) for device in range(own.devices())],
    )
    return module
