"""Cases of the self-check in Triton's interpreter, where the CPU replaces a GPU. `interpreter` runs them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from interlace.attention import AttentionPlan, _self_check, bitfield_attention, triton
from interlace.masks import BitfieldMask


@contextmanager
def checking(folder: Path) -> Iterator[list[str]]:
    """Self-check of the CPU's kernels, as in a new process with the cache `folder`; yields the logged lines."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log, settled, cache = _self_check.log, _self_check._backends, os.environ.get("INTERLACE_CACHE")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    os.environ["INTERLACE_CACHE"] = str(folder)
    _self_check._backends = {}
    _self_check.DEVICES.add("cpu")
    try:
        yield lines
    finally:
        _self_check.DEVICES.discard("cpu")
        _self_check._backends = settled
        os.environ.pop("INTERLACE_CACHE") if cache is None else os.environ.update(INTERLACE_CACHE=cache)
        log.setLevel(level)
        log.removeHandler(handler)


def attend(**options) -> None:
    """A small forward and backward."""
    mask = BitfieldMask.causal(1, 40)
    q, k = (torch.ones(1, heads, 40, 16, requires_grad=True) for heads in (2, 1))
    bitfield_attention(q, k, k, AttentionPlan.build(mask, block=16), backend="triton", **options).sum().backward()


def both_directions() -> None:
    """Each kernel is compared once; the random state is unchanged."""
    with tempfile.TemporaryDirectory() as folder, checking(Path(folder)) as lines:
        before = torch.get_rng_state()
        for _ in range(2):
            attend()
        assert torch.equal(before, torch.get_rng_state())
        about = "on Triton's interpreter, fp32, head dimension 16, blocks of 16: equals the reference"
        assert lines == [f"Triton forward {about}", f"Triton backward {about}"], lines
        lines.clear()
        attend(deterministic=False)
        assert [line.partition(" on ")[0] for line in lines] == ["Triton backward with atomics"], lines


def sabotaged() -> None:
    """A scale that is 10 % off is detected, forward and backward, and the error has all details."""
    forward, backward = triton.forward, triton.backward
    scaled = lambda job: job._replace(scale=1.1 * job.scale)  # noqa: E731
    for name, wrong in (
        ("forward", lambda job: forward(scaled(job))),
        ("backward", lambda job, *others: backward(scaled(job), *others)),
    ):
        with tempfile.TemporaryDirectory() as folder, checking(Path(folder)) as lines:
            try:
                setattr(triton, name, wrong)
                attend()
            except RuntimeError as error:
                words = str(error)
            else:
                raise AssertionError(f"a wrong {name} was accepted")
            finally:
                triton.forward, triton.backward = forward, backward
            assert f"Triton {name} is wrong on Triton's interpreter (fp32, head dimension 16" in words, words
            assert 'backend="reference"' in words and "bench/gpu.sh first" in words, words
            assert any("DIFFERS FROM" in line for line in lines), lines


CASES: dict[str, Callable[[], None]] = {
    "self-check: both directions": both_directions,
    "self-check: sabotaged": sabotaged,
}
