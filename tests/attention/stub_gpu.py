"""Compiles kernels for an absent GPU: `python -m tests.attention.stub_gpu BACKEND`.

It needs a separate process because Triton's driver is replaced permanently. Prints JSON: the result of warm_up, its
progress lines, and the kernels compiled by warm_up, by a forward and backward after it, and by a self-check after it.
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
import triton

from bench.warm_cache import Driver
from interlace.attention import AttentionPlan, _blocks, _self_check, bitfield_attention, gluon, warm_up
from interlace.attention import triton as triton_backend
from interlace.attention.backend import Attention
from interlace.kernels import bitfield_launch
from interlace.masks import BitfieldMask

HEADS = dict(q_heads=4, kv_heads=2, head_dim=64)
LENGTH = 304


def main(backend: str) -> None:
    compiled: list[str] = []
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_post_compile_hook = lambda **options: compiled.append(options["fn"].name)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    bitfield_launch.on_device = lambda device: contextlib.nullcontext()
    lines: list[str] = []
    number = warm_up(**HEADS, dtype=torch.float16, backend=backend, threads=2, progress=lines.append)
    warmed = list(compiled)
    compiled.clear()

    for module in (triton_backend, gluon):
        module.unsupported = lambda q, v: None  # CPU tensors replace those of a GPU: launches are no-ops
    _blocks.reads_maps = lambda device, block: True  # bitmaps, as on a GPU
    plan = AttentionPlan.build(BitfieldMask.causal(2, LENGTH), cap=1)  # split rows: a GPU always has memory for them
    q, k, v = (
        torch.zeros(2, LENGTH, heads, 64, dtype=torch.float16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
    )
    out = bitfield_attention(q, k, v, plan, backend=backend)
    assert isinstance(out, torch.Tensor)
    out.transpose(1, 2).sum().backward()
    called = list(compiled)
    compiled.clear()

    module = gluon if backend == "gluon" else triton_backend
    job = Attention(q.detach(), k.detach(), v.detach(), plan, 1.0, None)
    for direction in ("forward", "backward"):
        _self_check.compare(module, _self_check.kind_of(module, direction, job), job)
    print(json.dumps(dict(number=number, lines=lines, warmed=warmed, called=called, checked=compiled)))


if __name__ == "__main__":
    main(sys.argv[1])
