"""Fill Triton's cache with kernels for a Hopper GPU that is not present, to avoid compilation on it later.

    TRITON_CACHE_DIR=FOLDER python -m bench.warm_cache triton|gluon [pytest arguments]

Triton gets a driver whose device is sm_90 and whose launches do nothing. Its own code therefore computes the cache keys
of a launch on the GPU. They are valid if all of Triton's files are identical and ptxas has the same version. A process
fills the cache for one of two backends:

    triton    `bench.kernel_times`, and the tests that name this backend
    gluon     code that leaves the choice to the op or names Gluon, and the layout of HuggingFace's models

Tests are those of tests/gpu/test_attention.py in bf16. They run on the CPU at their GPU sizes. Every call of the CPU
backend is repeated on meta tensors with the backend for Hopper.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from bench.compile_worker import Configuration, calls
from bench.kernel_times import CASES, Case
from interlace.attention import AttentionPlan, cpu, gluon
from interlace.attention import triton as triton_backend
from interlace.attention.backend import Attention
from interlace.masks import BitfieldMask

ARCHITECTURE = 90
SHARED_MEMORY = 232_448  # bytes that a program may have on sm_90
BACKEND = "INTERLACE_WARM_CACHE"  # in the environment, for the workers of xdist: triton or gluon
TESTS = {"triton": "by_backend", "gluon": "not torch.float16 and not float32"}
MODELS = ((16, 16, 72), (12, 2, 128))  # heads, key heads, head dimension: SigLIP so400m and Qwen2.5-1.5B


class Driver:
    """Driver of a Hopper GPU on which kernels can be compiled and launches do nothing."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}

        @staticmethod
        def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
            return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0


def pytest_configure() -> None:
    """Install the driver in every worker of xdist, as a plugin of pytest."""
    install()


def install() -> None:
    """Install the driver, its device's capability, and launches that accompany every call of the CPU backend."""
    from tests.gpu import dense

    triton.runtime.driver.set_active(Driver())
    for call in calls(Configuration(ARCHITECTURE, part="plan")):  # needed by every process
        call.run()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    dense.LENGTH, dense.DIM = 1000, 128  # as on a GPU, set before the tests read them
    forward, backward = cpu.forward, cpu.backward

    def launching_forward(job: Attention) -> Any:
        launch_forward(job)
        return forward(job)

    def launching_backward(job: Attention, *others: Any) -> Any:
        launch_backward(job, *others)
        return backward(job, *others)

    cpu.forward, cpu.backward = launching_forward, launching_backward


def launch_forward(job: Attention) -> None:
    if (backend := backend_of(job)) is not None:
        backend.forward(on_meta(job))


def launch_backward(job: Attention, *others: Any) -> None:
    backend = backend_of(job)
    given = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in others]
    if backend is gluon:
        gluon.backward(on_meta(job), *given)
    if backend is triton_backend or not gluon.BACKWARD_IS_CHOSEN:
        triton_backend.backward(on_meta(job), *given)


def on_meta(job: Attention) -> Attention:
    return job._replace(**{name: getattr(job, name).to("meta") for name in ("q", "k", "v", "plan")})


def backend_of(job: Attention) -> ModuleType | None:
    """The backend that computes this on Hopper, None if neither does."""
    dim, widest = job.q.shape[3], max(job.q.shape[3], job.v.shape[3])
    if job.q.dtype not in triton_backend.DTYPES or widest > triton_backend.MAX_HEAD_DIM:
        return None
    fits = dim == job.v.shape[3] and dim <= gluon.MAX_HEAD_DIM and dim % 8 == 0 and job.plan.block == gluon.BLOCK
    fits &= job.q.dtype in gluon.DTYPES
    return gluon if fits and os.environ.get(BACKEND) != "triton" else triton_backend


def benchmarks() -> None:
    """Launches of `bench.kernel_times`."""
    for text in CASES:
        case = Case(text, torch.device("meta"))
        for kernel, label, tile, plan in case.arms():
            if label != "as PARTIAL":  # the same kernels
                for call in case.calls(kernel, tile, plan)[0]:
                    call.run()


def models() -> None:
    """Forward and backward in the layout of HuggingFace's models, [B, T, H, D] transposed."""
    for heads, kv_heads, dim in MODELS:
        for length in (1000, 1024):
            q, k, v = (
                torch.empty(1, length, n, dim, dtype=torch.bfloat16).transpose(1, 2)
                for n in (heads, kv_heads, kv_heads)
            )
            job = Attention(q, k, v, AttentionPlan.build(BitfieldMask.causal(1, length)), dim**-0.5, None)
            launch_forward(job)
            launch_backward(job, torch.empty_like(q), torch.empty(q.shape[:3]), torch.empty_like(q), None, False)


def main(argv: list[str]) -> int:
    backend, *arguments = argv
    os.environ |= {"INTERLACE_GPU_TESTS_ON": "cpu", BACKEND: backend}
    install()
    if backend == "triton":
        benchmarks()
    else:
        models()
    plain = ["-q", "-k", TESTS[backend], "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    return int(pytest.main(["-p", "bench.warm_cache", *plain, "tests/gpu/test_attention.py", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
