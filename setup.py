"""Builds csrc/ into the extension module interlace._core. Everything else about the package is in pyproject.toml.

Torch is not needed here: the extension takes and returns numpy arrays. The flags are portable (no -march=native), so
that a wheel runs on any x86-64 or arm64 machine; code that wants wider vectors picks them at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# One compiler process per core; INTERLACE_BUILD_JOBS sets another number.
ParallelCompile("INTERLACE_BUILD_JOBS", default=0).install()


class BuildExt(build_ext):
    """Compiles the scheduler (all but attention_cpu/) without fused multiply-adds.

    A compiler for arm64, or for x86-64 with -march, would fuse products into sums where it likes, which rounds in
    another way: ties would break differently from platform to platform.
    """

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_unfused(obj: Any, source: str, ext: Any, cc_args: Any, extra_postargs: Any, pp_opts: Any) -> None:
            flags = [] if "attention_cpu" in source else ["-ffp-contract=off"]
            compile_one(obj, source, ext, cc_args, [*extra_postargs, *flags], pp_opts)

        self.compiler._compile = compile_unfused
        super().build_extensions()


# Paths relative to this file: setuptools refuses absolute ones, and they must not depend on the machine.
csrc = Path("csrc")

setup(
    ext_modules=[
        Pybind11Extension(
            "interlace._core",
            sources=sorted(path.as_posix() for path in csrc.rglob("*.cpp")),
            depends=sorted(path.as_posix() for pattern in ("*.h", "*.inc") for path in csrc.rglob(pattern)),
            include_dirs=["csrc"],
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
