"""``interlace doctor machine``: features of this machine, and why others are unavailable. Every check really runs."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from interlace._text import one_line
from interlace.train.commands.tables import console_of, table_of, version_of

Check = tuple[bool | None, str]  # on, off, or None = not relevant here; and the reason or version


def machine(_: argparse.Namespace) -> int:
    """Prints the table; exit code 0 if training can run here, else 1."""
    columns = ("", "part", "what was found")
    table = table_of("interlace doctor", *columns, left=columns)
    verdicts: dict[str, bool | None] = {}
    for section in (_basics, _attention, _transports, _devices, _data):
        for name, check in section().items():
            verdicts[name], text = _tried(check)
            table.add_row({True: "[green]on", False: "[red]off", None: "[dim]-"}[verdicts[name]], name, text)
        table.add_section()
    broken = [name for name, on in verdicts.items() if on is False and name in REQUIRED]
    console = console_of(200)  # avoids truncated paths
    console.print(table)
    if broken:
        console.print(f"training cannot run here: {', '.join(broken)}")
        return 1
    console.print("training can run here" + ("" if verdicts["gloo"] else ", on one rank: several need gloo"))
    return 0


REQUIRED = {"python", "torch", "transformers", "interlace._core", "interlace.train", "attention: reference"}


def _tried(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # any error is a result of the check
        return False, one_line(error, 160)


def _basics() -> dict[str, Callable[[], Check]]:
    def python() -> Check:
        good = (3, 10) <= sys.version_info[:2] <= (3, 13)
        return good, f"{platform.python_version()} on {platform.machine()}" + ("" if good else "; 3.10 to 3.13 needed")

    def torch() -> Check:
        import torch

        return True, f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"

    def transformers() -> Check:
        from interlace.train.models.build import transformers_missing

        missing = transformers_missing()
        return not missing, missing or importlib.metadata.version("transformers")

    def core() -> Check:
        from interlace import _core

        return True, str(_core.__file__)

    def train() -> Check:
        for part in ("commands.train", "data.feed", "rank"):  # these import everything that a run needs
            importlib.import_module(f"interlace.train.{part}")
        return True, "can be imported"

    return {
        "python": python,
        "torch": torch,
        "transformers": transformers,
        "triton": lambda: _installed("triton", "CPU backends need none"),
        "versions": _versions,
        "interlace._core": core,
        "interlace.train": train,
    }


def _versions() -> Check:
    """Checks that installed libraries are in the version ranges declared by this installation of Interlace."""
    from packaging.requirements import Requirement

    others = []
    for line in importlib.metadata.requires("interlace") or []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = version_of(needed.name)
        if version == "missing" or not needed.specifier.contains(version, prereleases=True):
            others.append(f"{needed.name} is {version}, declared is {needed.specifier}")
    return (None, "; ".join(others)) if others else (True, "all libraries lie in the ranges that Interlace declares")


def _attention() -> dict[str, Callable[[], Check]]:
    def backend(name: str) -> Check:
        import torch

        from interlace.attention import bitfield_attention
        from interlace.masks import BitfieldMask

        device = "cuda" if name in ("triton", "gluon") and torch.cuda.is_available() else "cpu"
        q = torch.randn(1, 2, 16, 16, device=device)
        if name == "gluon":  # without fp32 support; fp32 would hide the actual reason
            q = q.bfloat16()
        out = bitfield_attention(q, q, q, BitfieldMask.causal(1, 16).to(device), backend=name)
        assert isinstance(out, torch.Tensor)
        how = f"runs on {device}"
        if name == "cpu":
            from interlace import _core

            how += f", instruction set {_core.attention_isa()}"
        return bool(torch.isfinite(out).all()), how

    every = {f"attention: {name}": partial(backend, name) for name in ("reference", "cpu", "triton", "gluon")}
    return every | {"attention: chosen": _chosen, "attention: self-checks": _self_checks}


def _chosen() -> Check:
    """Backend chosen by backend=None for the most common shape, and reasons against faster ones."""
    import torch

    from interlace.attention._self_check import verdicts
    from interlace.attention.op import choose_backend, unsupported

    shape = "bf16, head dimension 128"
    if not torch.cuda.is_available():
        return True, f"{choose_backend(torch.empty(1, 1, 1, 128, dtype=torch.bfloat16))} ({shape}); no GPU here"
    device = torch.device("cuda", torch.cuda.current_device())
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    name = choose_backend(q)
    if name != "gluon":
        faster = ("gluon", "triton")[: 1 if name == "triton" else 2]
        return True, f"{name} ({shape}); " + "; ".join(f"{other} is off, {unsupported(other, q)}" for other in faster)
    if any((each.kernel, each.shape, each.passed) == ("Gluon forward", shape, False) for each in verdicts(device)):
        return True, f"triton ({shape}); gluon is off, its forward differs from the reference on this card"
    if (back := choose_backend(q, forward=False)) == name:
        return True, f"gluon ({shape}); it was the faster one on an H200"
    untried = "its backward has not been shown right and faster on a GPU yet"
    return True, f"gluon forward, {back} backward ({shape}); gluon's forward was the faster one on an H200, {untried}"


def _self_checks() -> Check:
    """Cached verdicts on the kernels of this card, including those run by the rows above."""
    import torch

    from interlace.attention._self_check import verdicts

    if os.environ.get("INTERLACE_SELF_CHECK") == "0":
        return None, "off: INTERLACE_SELF_CHECK=0"
    if not torch.cuda.is_available():
        return None, "kernels are compared with the reference when a GPU first uses them; no GPU here"
    checks = verdicts(torch.device("cuda", torch.cuda.current_device()))
    if not checks:
        return None, "no kernel was used yet with this card, driver and version"
    wrong = [
        f"{each.kernel} ({each.shape}) DIFFERS from the reference: {each.result} by {each.error:.1e}, allowed "
        f"{each.allowed:.1e}"
        for each in checks
        if not each.passed
    ]
    right = [f"{each.kernel} ({each.shape})" for each in checks if each.passed]
    parts = [*wrong, *([f"equal to the reference: {', '.join(right)}"] if right else [])]
    return not wrong, "; ".join(parts)


def _transports() -> dict[str, Callable[[], Check]]:
    def check(name: str) -> Check:
        from interlace.comm.transports import capabilities

        every = capabilities()
        transport = every[name]
        if transport.missing:
            return False, transport.missing
        if name == "local":
            return True, "one process plays every rank"
        first = next(other for other, each in every.items() if each.device == transport.device and not each.missing)
        text = "GPU processes" if transport.device == "cuda" else "CPU processes"
        text += " of one host" if transport.one_host else ""
        text += ", copy engines" if transport.copy_engine else ""
        return True, text + (" (first choice here)" if name == first else "")

    # Best first, for each kind of device: interlace.comm.transports.choose.
    return {name: partial(check, name) for name in ("local", "cuda_ipc", "symm_mem", "nccl", "shm", "gloo")}


def _devices() -> dict[str, Callable[[], Check]]:
    def cuda() -> Check:
        import torch

        if torch.version.cuda is None:
            return False, f"torch {torch.__version__} is a build without CUDA"
        if not torch.cuda.is_available():
            return False, "no GPU or no driver"
        major, minor = torch.cuda.get_device_capability()
        return True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} (sm_{major}{minor})"

    def run_device() -> Check:
        import torch

        from interlace.train.device import choose

        if choose("auto", 1) == "cpu":
            return True, 'cpu: run.device = "auto" finds no GPU'
        gpus = torch.cuda.device_count()
        return True, f'cuda: run.device = "auto" takes a GPU per rank for up to {gpus} ranks here, and the CPU for more'

    return {"cuda": cuda, "run.device": run_device}


def _data() -> dict[str, Callable[[], Check]]:
    def stamps() -> Check:
        from interlace.data import cache_folder, find_stamps

        folder = find_stamps()
        return (True, str(folder)) if folder else (None, f"not fetched yet; they will go to {cache_folder()}")

    def apt() -> Check:
        tools = [tool for tool in ("apt-get", "dpkg", "dpkg-deb") if shutil.which(tool) is None]
        if tools:
            return False, f"no {' and '.join(tools)}: stamps fall back to digits"
        command = ["apt-get", "--print-uris", "update"]  # reads the sources without network access
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
        lists = [line for line in done.stdout.splitlines() if line.startswith("'")]
        if done.returncode or not lists:
            reason = (done.stderr.strip().splitlines() or ["no package source is configured"])[0]
            return False, f"{reason}: stamps fall back to digits"
        hosts = sorted({line[1:].split("'")[0].split("/")[2] for line in lists})
        return True, f"runs; would fetch the stamps from {', '.join(hosts)} (not asked now)"

    return {
        "images: pillow": lambda: _installed("PIL", "PNG and JPEG are not read", "pillow"),
        "images: resvg": lambda: _installed("resvg_py", "SVG stamps are left out", "resvg-py"),
        "speech: soundfile": lambda: _installed("soundfile", "speech is left out"),
        "digits: scikit-learn": lambda: _installed("sklearn", "no digits", "scikit-learn"),
        "apt": apt,
        "stamps": stamps,
    }


def _installed(module: str, without: str, package: str | None = None) -> Check:
    if importlib.util.find_spec(module) is None:
        return False, f"not installed: {without} (pip install {package or module})"
    return True, importlib.metadata.version(package or module)
