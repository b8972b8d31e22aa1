"""Builds csrc/ into the extension module interlace._core. Everything else about the package is in pyproject.toml.

Torch is not needed here: the extension takes and returns numpy arrays. The flags are portable (no -march=native), so
that a wheel runs on any x86-64 or arm64 machine; code that wants wider vectors picks them at run time.
"""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# One compiler process per core; INTERLACE_BUILD_JOBS sets another number.
ParallelCompile("INTERLACE_BUILD_JOBS", default=0).install()

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
    cmdclass={"build_ext": build_ext},
)
