"""Compile a `Call` for a named NVIDIA architecture without a GPU, and read what it costs from its machine code.

Works where Triton is not interpreting (TRITON_INTERPRET unset). Used by the tests and by benchmark reports.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .bitfield_launch import Call

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Resources(NamedTuple):
    """What one compiled kernel uses. shared: bytes. spills: bytes of stack plus local loads and stores in the code."""

    registers: int
    shared: int
    spills: int
    wgmma: int  # HGMMA instructions (Hopper)
    mma: int  # HMMA instructions (Ampere and later)
    tcgen: int  # UTCHMMA instructions (Blackwell)
    tma: int  # UTMALDG instructions: loads by the tensor memory accelerator (Hopper and later)


def compile_call(call: Call, architecture: int) -> Any:
    """The kernel of `call`, specialised as its launch would, as triton's CompiledKernel for `architecture` (80, 90)."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set; unset it and start a new process")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(call.kernel.params):
        value = call.arguments[parameter.name]
        if hasattr(value, "block_shape"):  # a TMA descriptor
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = _source_class(call.kernel)(call.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=call.options)


def _source_class(kernel: Any) -> Any:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def machine_code(compiled: Any) -> str:
    """The SASS of a CompiledKernel, as nvdisasm prints it."""
    return _read(compiled, "nvdisasm", "-c")


def resources(compiled: Any, code: str) -> Resources:
    """Registers, shared memory, spills and tensor-core instructions of a CompiledKernel; code: its `machine_code`.

    (`n_spills` of triton is only filled in when a GPU loads the kernel.)
    """
    usage = _read(compiled, "cuobjdump", "-res-usage")
    registers, stack = (int(_find(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    count = {
        name: len(re.findall(rf"\b{name}\b", code)) for name in ("STL", "LDL", "HGMMA", "HMMA", "UTCHMMA", "UTMALDG")
    }
    return Resources(
        registers=registers,
        shared=compiled.metadata.shared,
        spills=stack + count["STL"] + count["LDL"],
        wgmma=count["HGMMA"],
        mma=count["HMMA"],
        tcgen=count["UTCHMMA"],
        tma=count["UTMALDG"],
    )


def _read(compiled: Any, tool: str, option: str) -> str:
    """What a tool of triton's wheel prints about the kernel's cubin."""
    path = getattr(triton.knobs.nvidia, tool).path
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return subprocess.run([path, option, str(cubin)], check=True, capture_output=True, text=True).stdout


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no {pattern!r}: {text[:200]}")
    return match.group(1)
