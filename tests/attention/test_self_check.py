"""Self-check: verdicts, their cache, and the handling of a wrong kernel.

Tests that need no interpreter use the CPU backend as the kernels. tests/attention/self_checks.py has the Triton cases.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from interlace.attention import AttentionPlan, _self_check, cpu, gluon, triton
from interlace.attention.backend import Attention
from interlace.masks import BitfieldMask
from tests.attention.self_checks import attend, checking

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Triton and Gluon compute on the CPU."""
    for module in (triton, gluon):
        monkeypatch.setattr(module, "unsupported", lambda q, v: None)
        monkeypatch.setattr(module, "forward", cpu.forward)
        monkeypatch.setattr(module, "backward", cpu.backward)
    monkeypatch.setattr(triton, "atomic_backward", cpu.backward)


def wrong(job):
    out, lse = cpu.forward(job)
    out[0, 0, -1, 0] += 1.0  # one number of all
    return out, lse


def wrong_backward(job, *given):
    dq, dk, dv = cpu.backward(job, *given)
    dk[0, 0, 0, 0] += 1.0
    return dq, dk, dv


def job(dtype=torch.bfloat16, columns=64):
    q = torch.zeros(1, 2, 20, columns, dtype=dtype)
    return Attention(q, q, q, AttentionPlan.build(BitfieldMask.causal(1, 20)), 1.0, None)


def test_a_verdict_serves_later_processes(tmp_path):
    with checking(tmp_path) as lines:
        attend()
        assert len(lines) == 2
    with checking(tmp_path) as lines:  # as another process
        attend()
        assert lines == []
        assert [result.kernel for result in _self_check.verdicts(torch.device("cpu"))] == [
            "Triton backward",
            "Triton forward",
        ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": true}', "\0"])
def test_a_damaged_verdict_is_ignored(tmp_path, text):
    with checking(tmp_path) as lines:
        attend()
        for file in tmp_path.rglob("*.json"):
            file.write_text(text)
        _self_check._backends.clear()
        attend()
        assert len(lines) == 4
        assert all(json.loads(file.read_text())["passed"] is True for file in tmp_path.rglob("*.json"))


def test_a_cache_that_cannot_be_written_costs_a_check(tmp_path):
    (tmp_path / "file").write_text("")
    with checking(tmp_path / "file") as lines:
        attend()
        assert len(lines) == 2


def test_verdicts_are_of_one_version(tmp_path, monkeypatch):
    with checking(tmp_path):
        attend()
        monkeypatch.setattr(_self_check, "_sources", lambda: ("another", "hash"))
        assert _self_check.verdicts(torch.device("cpu")) == []


def test_a_kernel_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_self_check, "LONGEST", 0.01)
    monkeypatch.setattr(_self_check._device, "done", lambda device: lambda: False)
    monkeypatch.setattr(_self_check, "_hung", {})
    with checking(tmp_path):
        for backend in (gluon, triton):  # no later kernel runs there either
            with pytest.raises(RuntimeError, match=r'Gluon forward did not finish .*backend="triton"'):
                _self_check.checked(backend, "forward", job(), named=False)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_kernel_that_is_wrong_is_refused_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(triton, "forward", wrong)
    with checking(tmp_path) as lines:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r'Triton forward is wrong .*out differs .*Use backend="reference"'):
                attend()
        assert len(lines) == 2  # checked again: a negative verdict is shown but not reused
        assert [result.passed for result in _self_check.verdicts(torch.device("cpu"))] == [False]
        monkeypatch.setattr(triton, "forward", cpu.forward)
        attend()


@pytest.mark.parametrize(("direction", "other"), [("forward", "backward"), ("backward", "forward")])
def test_triton_takes_the_place_of_a_wrong_gluon(tmp_path, monkeypatch, direction, other):
    monkeypatch.setattr(gluon, "unsupported_backward", lambda job: None)  # of a plan without bitmaps: the CPU's
    monkeypatch.setattr(gluon, direction, {"forward": wrong, "backward": wrong_backward}[direction])
    with checking(tmp_path):
        with pytest.warns(
            RuntimeWarning, match=rf'Gluon {direction} is wrong.*bf16, head dimension 64.*backend="triton" is'
        ):
            assert _self_check.checked(gluon, direction, job(), named=False) is triton
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _self_check.checked(gluon, direction, job(), named=False) is triton
            assert _self_check.checked(gluon, other, job(), named=False) is gluon
        with pytest.raises(RuntimeError, match=rf'Gluon {direction} is wrong.*Use backend="triton" or "reference"'):
            _self_check.checked(gluon, direction, job(), named=True)


def test_what_gluon_leaves_to_triton_is_checked_as_such(tmp_path):
    with checking(tmp_path) as lines:
        assert _self_check.checked(gluon, "backward", job(), named=True) is gluon
        assert [line.partition(" on ")[0] for line in lines] == ["Triton backward"]


def test_tf32_is_a_kind_of_its_own(tmp_path, monkeypatch):
    with checking(tmp_path) as lines:
        for _ in range(2):
            attend()
            monkeypatch.setattr(_self_check, "_tf32", lambda: True)
        assert [line.partition(", ")[2].partition(",")[0] for line in lines] == ["fp32", "fp32", "tf32", "tf32"]


def test_a_result_of_nan_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(triton, "forward", lambda job: tuple(x * torch.nan for x in cpu.forward(job)))
    with checking(tmp_path), pytest.raises(RuntimeError, match="Triton forward is wrong"):
        attend()


def test_it_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERLACE_SELF_CHECK", "0")
    monkeypatch.setattr(triton, "forward", wrong)
    with checking(tmp_path) as lines:
        attend()
        assert lines == [] and not list(tmp_path.iterdir())


def test_a_capture_is_not_disturbed(tmp_path, monkeypatch):
    with checking(tmp_path) as lines:
        with monkeypatch.context() as capture:
            capture.setattr(_self_check, "_capturing", lambda device: True)
            attend()
        assert lines == []
        attend()  # the postponed check runs
        assert len(lines) == 2


@pytest.mark.parametrize("setting", ["autocast", "default device", "compile"])
def test_the_surroundings_play_no_part(tmp_path, setting):
    with checking(tmp_path) as lines:
        if setting == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                attend()
        elif setting == "default device":
            q = torch.zeros(1, 2, 20, 16)
            plan = AttentionPlan.build(BitfieldMask.causal(1, 20))
            with torch.device("meta"):
                assert _self_check.checked(triton, "forward", Attention(q, q, q, plan, 1.0, None), named=True) is triton
        else:
            torch.compile(attend, backend="eager")()
        assert lines and all(line.endswith("equals the reference") for line in lines)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("by_token", [False, True])
def test_strides_look_as_those_of_the_call(heads, kv_heads, by_token):
    """For Triton: the compared kernels are those that the call launches."""
    from interlace.kernels.bitfield_launch import _strides

    shapes = [(1, n, 32, 64) for n in (heads, kv_heads, kv_heads)]
    given = [torch.zeros(b, t, n, d).transpose(1, 2) if by_token else torch.zeros(b, n, t, d) for b, n, t, d in shapes]
    call = Attention(*given, AttentionPlan.build(BitfieldMask.causal(1, 32)), 1.0, None)
    made, _ = _self_check._case(_self_check.kind_of(triton, "forward", call), call, torch.device("cpu"))
    assert made[0].shape[1] == 2 * made[1].shape[1]  # query heads share a key head
    looks = []
    for q, k, v in (made[:3], given):
        strides, align = _strides(q=q, k=k, v=v)
        looks.append((align, {name: (stride % 16 == 0, stride == 1) for name, stride in strides.items()}))
    assert looks[0] == looks[1]
