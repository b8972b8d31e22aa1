"""Launches without a GPU: arguments of kernels at the first launch and after preparation.

    python -m tests.kernels.stub_launches

runs every case twice with a recording driver (`bench.warm_cache.Driver`) and prints the differences as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from bench.warm_cache import Driver
from interlace.attention import AttentionPlan, gluon
from interlace.attention import triton as triton_backend
from interlace.attention.backend import Attention
from interlace.masks import BitfieldMask

RECORDED: list[tuple[Any, ...]] = []


class Recording(Driver):
    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        # Beside its arguments a launch has the grid, a stream, the kernel and hooks.
        return lambda *given: RECORDED.append((source.fn.__name__, *given[:3], *given[9:]))


def plans() -> dict[str, AttentionPlan]:
    mask = BitfieldMask.causal(1, 300)
    split = AttentionPlan.build(BitfieldMask.causal(1, 600), cap=2)
    return {"plain": _mapped(AttentionPlan.build(mask)), "computed": AttentionPlan.build(mask), "split": _mapped(split)}


def _mapped(plan: AttentionPlan) -> AttentionPlan:
    """Adds memory for bitmaps, as on a GPU."""
    maps = {f"part_{side}_map": torch.zeros(getattr(plan, f"part_{side}_idx").numel(), 129, 4).int() for side in "qk"}
    return replace(plan, **maps)


def record(run: Callable[[], Any], names: dict[int, str]) -> list[Any]:
    """Launches of `run`: addresses replaced by tensor names, all others numbered in the order of their use."""
    RECORDED.clear()
    made: dict[int, str] = {}

    def told(value: Any) -> Any:
        if hasattr(value, "block_shape"):
            return "descriptor", told(value.base), list(value.shape), list(value.strides), list(value.block_shape)
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value if isinstance(value, int) else None
        if address is None or isinstance(value, bool) or 0 < address < 2**32:
            return value
        return names.get(address) or made.setdefault(address, f"made {len(made)}") if address else "empty"

    run()
    return [[told(value) for value in launch] for launch in RECORDED]


def cases() -> dict[str, tuple[Callable[[], Any], dict[int, str]]]:
    result = {}
    for name, plan in plans().items():
        for backend, dim, options in (
            ("triton", 128, {}), ("triton", 64, {"softcap": 2.0}), ("triton", 256, {}), ("triton", 64, {"float": True}),
            ("gluon", 128, {}), ("gluon", 80, {}),
        ):  # fmt: skip
            dtype = torch.float32 if options.get("float") else torch.bfloat16
            q = torch.zeros(1, plan.q_len, 4, dim, dtype=dtype).transpose(1, 2)
            k, v = (torch.zeros(1, 2, plan.k_len, dim, dtype=dtype) for _ in range(2))
            dout, out, lse = (
                torch.zeros(1, 4, plan.q_len, dim, dtype=dtype),
                torch.zeros_like(q),
                torch.zeros(1, 4, plan.q_len),
            )
            out = out.contiguous()
            job = Attention(q, k, v, plan, 0.5, options.get("softcap"))
            tensors = dict(q=q, k=k, v=v, dout=dout, out=out, lse=lse, dlse=torch.zeros_like(lse))
            tensors |= {f"plan {at}": tensor for at, tensor in enumerate(plan.tensors()) if tensor.numel()}
            names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
            title = f"{name}, {backend}, {dim}, {options}"
            module = gluon if backend == "gluon" else triton_backend
            if module is triton_backend and (dim, dtype) == (
                128,
                torch.bfloat16,
            ):  # one tensor as queries and keys, on the previous plan
                alike = torch.zeros(1, 4, plan.q_len, dim, dtype=dtype)
                once = Attention(alike, alike, alike, plan, 0.5, None)
                result[f"{title}, one tensor"] = (
                    lambda job=once: triton_backend.forward(job),
                    names | {alike.data_ptr(): "x"},
                )
                others = [torch.zeros_like(alike) for _ in range(3)]
                told = names | {x.data_ptr(): name for x, name in zip(others, "qkv")}
                apart = Attention(*others, plan, 0.5, None)
                result[f"{title}, three tensors"] = (lambda job=apart: triton_backend.forward(job), told)
            result[f"{title}, forward"] = (lambda job=job, module=module: module.forward(job), names)
            for dlse, wide in ((None, False), (tensors["dlse"], True)):
                given = (job, out, lse, dout, dlse, wide)
                run = lambda given=given, module=module: module.backward(*given)  # noqa: E731
                result[f"{title}, backward, {wide}"] = (run, names)
    return result


def main() -> None:
    triton.runtime.driver.set_active(Recording())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from interlace.kernels import bitfield_launch

    bitfield_launch.architecture_of = lambda device: 90
    different = {}
    count = 0
    for name, (run, names) in cases().items():
        first = record(run, names)
        assert record(run, names) == first
        second = record(run, names)
        count += len(first)
        if json.dumps(first) != json.dumps(second):
            different[name] = [(a, b) for a, b in zip(first, second) if json.dumps(a) != json.dumps(b)][:1] or "number"
    print(json.dumps({"launches": count, "different": different}))


if __name__ == "__main__":
    main()
