"""Comparison of attention backends with dense attention in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.backend import accumulate_dtype
from interlace.attention.op import run_backward, run_forward
from tests.attention import cases
from tests.judge import judge

ROOT = Path(__file__).parents[2]


TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5}  # 16 bits are judged by torch's errors


def close(got, wanted, tolerance, what):
    """Error relative to the largest entry; infinities must be equal, and NaN always fails."""
    assert torch.equal(got.isinf(), wanted.isinf()), what
    got, wanted = got.double().masked_fill(got.isinf(), 0), wanted.double().masked_fill(wanted.isinf(), 0)
    error = (got - wanted).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0), (what, error)


def agree(results, inputs, dense, dout, dlse, scale, softcap=None):
    """Checks out, lse, dq, dk, dv of attention against dense attention in fp64, within the accuracy of their dtype."""
    inputs = [x.detach() for x in inputs]
    dtype = inputs[0].dtype
    exact = [x.double().requires_grad_() for x in inputs]
    wanted, wanted_lse = cases.oracle(*exact, dense, scale, softcap)
    seen = wanted_lse > -torch.inf
    loss = (wanted * dout.double()).sum() + (wanted_lse[seen] * dlse.double()[seen]).sum()
    wanted = [wanted, wanted_lse, *torch.autograd.grad(loss, exact)]
    torchs = [None] * 5 if dtype in TOLERANCE else cases.renderings(*inputs, dense, scale, softcap, dout, dlse)
    for name, got, one, exact in zip(("out", "lse", "dq", "dk", "dv"), results, torchs, wanted):
        if name == "lse":
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            close(got, exact, min(TOLERANCE.get(dtype, 1), 1e-4), "lse")
        elif one is None:
            assert got.dtype == dtype, name
            close(got, exact, TOLERANCE[dtype], name)
        else:
            judge(name, got, one, exact)


def directions(out, lse):
    """Gradients of out and lse, from a fixed seed."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]


def compare(
    backend, mask, keys, dtype, heads=4, kv_heads=2, dim=8, softcap=None, scale=0.4, block=16, cap=None,
    deterministic=True, value_dim=None,
):  # fmt: skip
    """Forward and backward of a loss that uses both outputs, against the oracle."""
    q, k, v = cases.tensors(mask, keys, heads, kv_heads, dim, dtype, value_dim)
    plan = AttentionPlan.build(mask, keys, block=block, cap=cap)
    options = dict(scale=scale, softcap=softcap, return_lse=True, deterministic=deterministic, backend=backend)
    out, lse = bitfield_attention(q, k, v, plan, **options)
    dout, dlse = directions(out, lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    agree((out, lse, *grads), (q, k, v), mask.to_dense(keys), dout, dlse, scale, softcap)


def finished(script, **environment):
    """Runs the script in a separate process that has the modules of this one."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )  # fmt: skip


def run(script, **environment):
    """Output of a script that must succeed."""
    process = finished(script, **environment)
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def wide_key_gradients(backend, dtype, dim, kv_heads):
    mask = cases.masks()["packed"][0]
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 4, kv_heads, dim, dtype))
    plan = AttentionPlan.build(mask, block=32)
    options = (plan, 0.4, None, backend)
    out, lse = run_forward(q, k, v, *options)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    arguments = (dout, None, q, k, v, out, lse, *options[:3], True, backend)
    dq, *rounded = run_backward(*arguments)
    dq_too, *wide = run_backward(*arguments, wide=True)
    assert torch.equal(dq, dq_too)
    for one, other in zip(rounded, wide):
        assert other.dtype == accumulate_dtype(dtype) and one.dtype == dtype
        assert torch.equal(one, other.to(dtype))
        assert dtype.itemsize > 2 or not torch.equal(one.to(other.dtype), other)
