"""`make test-asan` runs an instrumented module, and a sanitizer error ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace import _core

pytestmark = pytest.mark.skipif("INTERLACE_SANITIZE" not in os.environ, reason="for `make test-asan`")

# Reads 16 bytes of 8: the runtime library checks memcpy for every caller.
OVERREAD = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memcpy(*map(ctypes.c_void_p, (libc.malloc(16), libc.malloc(8))), 16)
"""


def test_module_is_instrumented_and_sanitizers_are_loaded():
    module = Path(_core.__file__)
    code, mapped = module.read_bytes(), Path("/proc/self/maps").read_text()
    # Each kind of check calls its handler by name; handlers that end in _abort do not return.
    for handler in (
        b"asan_report_load8",
        b"ubsan_handle_add_overflow_abort",
        b"ubsan_handle_float_cast_overflow_abort",
    ):
        assert b"__" + handler in code, f"{handler} is missing in {module}"
    for library in ("libasan", "libubsan", str(module)):
        assert library in mapped


def test_a_report_ends_the_process():
    options = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # without the log that `make test-asan` shows
    result = subprocess.run([sys.executable, "-c", OVERREAD], env=options, capture_output=True, text=True, timeout=600)
    assert result.returncode != 0 and "heap-buffer-overflow" in result.stderr
