"""Builds csrc/ into the extension module interlace._core. Everything else about the package is in pyproject.toml.

Torch is not needed here: the extension takes and returns numpy arrays. The flags are portable (no -march=native), so
that a wheel runs on any x86-64 or arm64 machine; code that wants wider vectors picks them at run time.

INTERLACE_SANITIZE=1 builds it with AddressSanitizer and UndefinedBehaviorSanitizer instead, for `make test-asan`: a
module that only loads where their runtime libraries are in the process before it. INTERLACE_OPTIMIZE=-O0 compiles in
half of the time what then runs slowly: for builds that are only looked at.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

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
        self.check_compiler()
        super().build_extensions()

    def check_compiler(self) -> None:
        """Ends the build with what to install, where it would end with the failure of a command that nobody knows."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text("#include <Python.h>\n#include <optional>\nstd::optional<int> nothing;\n")
            headers = sysconfig.get_path("include")
            try:
                self.compiler.compile([str(probe)], folder, include_dirs=[headers], extra_postargs=["-std=c++17"])
            except CompileError as error:
                raise SystemExit(
                    f"""
error: Interlace's C++ part cannot be compiled here ({error}).
It needs a compiler for C++17 (GCC 9 or later, Clang 10 or later) and the headers of this Python in {headers}:
  Debian, Ubuntu:  apt-get install g++ python3-dev
  Fedora, RHEL:    dnf install gcc-c++ python3-devel
  macOS:           xcode-select --install
CC and CXX name another compiler. A wheel that was built elsewhere (`make wheel`) needs none."""
                ) from None


# Paths relative to this file: setuptools refuses absolute ones, and they must not depend on the machine.
csrc = Path("csrc")

sanitizers = [
    "-fsanitize=address,undefined,float-cast-overflow",  # the last one is not part of "undefined" in GCC
    "-fno-wrapv",  # Python's own flags may ask for overflows that wrap: then none would be reported
    "-fno-sanitize-recover=all",  # whatever is found ends the process
    "-fno-omit-frame-pointer",
]
if os.environ.get("INTERLACE_SANITIZE"):
    # -O1 keeps lines and variables of a report true; the library's own assertions check what lies within an allocation.
    compile_args, link_args = ["-O1", "-g1", "-D_GLIBCXX_ASSERTIONS", *sanitizers], sanitizers
else:
    compile_args, link_args = [os.environ.get("INTERLACE_OPTIMIZE", "-O3")], []

setup(
    ext_modules=[
        Pybind11Extension(
            "interlace._core",
            sources=sorted(path.as_posix() for path in csrc.rglob("*.cpp")),
            depends=["setup.py", *sorted(path.as_posix() for glob in ("*.h", "*.inc") for path in csrc.rglob(glob))],
            include_dirs=["csrc"],
            extra_compile_args=["-Wall", "-Wextra", *compile_args],
            extra_link_args=link_args,
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
