"""`interlace doctor` on a machine with a GPU, as far as testable without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from interlace.attention import _self_check, op
from interlace.attention._self_check import Kind, Verdict
from interlace.train.commands import doctor

pytest.importorskip("triton")
SHAPE = "bf16, head dimension 128"


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One Hopper GPU with an empty cache of verdicts."""
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_self_check, "card", lambda device: "NVIDIA H200")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))


def keep(language: str, direction: str, passed: bool) -> None:
    kind = Kind(language, direction, torch.bfloat16, 128, 128, 128, False, True)
    file = _self_check.folder(torch.device("cuda", 0)) / kind.file
    file.parent.mkdir(parents=True, exist_ok=True)
    verdict = Verdict(kind.kernel, kind.shape, passed, "dq", 0.003 if passed else 0.5, 0.0156)
    file.write_text(json.dumps(verdict._asdict()))


def test_cached_verdicts_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._self_checks() == (None, "no kernel was used yet with this card, driver and version")
    keep("triton", "forward", True)
    keep("triton", "backward", True)
    right = f"Triton backward ({SHAPE}), Triton forward ({SHAPE})"
    assert doctor._self_checks() == (True, f"equal to the reference: {right}")
    keep("triton", "atomic_backward", False)
    on, text = doctor._self_checks()
    wrong = f"Triton backward with atomics ({SHAPE}) DIFFERS from the reference: dq by 5.0e-01, allowed 1.6e-02"
    assert (on, text) == (False, f"{wrong}; equal to the reference: {right}")
    monkeypatch.setenv("INTERLACE_SELF_CHECK", "0")
    assert doctor._self_checks() == (None, "off: INTERLACE_SELF_CHECK=0")


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            {},
            f"gluon forward, triton backward ({SHAPE}); gluon's forward was the faster one on an H200, "
            "its backward has not been shown right and faster on a GPU yet",
        ),
        ({"gluon": "no Hopper"}, f"triton ({SHAPE}); gluon is off, no Hopper"),
        ({"gluon": "old", "triton": "older"}, f"reference ({SHAPE}); gluon is off, old; triton is off, older"),
    ],
)
def test_the_choice_has_its_reason(monkeypatch: pytest.MonkeyPatch, refused: dict[str, str], text: str) -> None:
    names = [name for name in ("gluon", "triton", "reference") if name not in refused]
    monkeypatch.setattr(op, "choose_backend", lambda q, forward=True: names[0] if forward else names[1])
    monkeypatch.setattr(op, "unsupported", lambda name, q: refused.get(name))
    assert doctor._chosen() == (True, text)


def test_a_kernel_that_differs_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "choose_backend", lambda q, forward=True: "gluon" if forward else "triton")
    keep("gluon", "forward", False)
    on, text = doctor._chosen()
    assert on and text.startswith(f"triton ({SHAPE}); gluon is off, its forward differs")
