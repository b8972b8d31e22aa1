"""The Triton backend's cases, and a worker process that runs them in Triton's interpreter.

An environment variable selects the interpreter when kernels are imported, and an interpreting process cannot compile.
So the test process does not import kernels itself. It starts `python -m tests.attention.interpreter` once and sends
names of cases, one a line. Each answer is a line of JSON: null or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.op import run_backward, run_forward
from interlace.masks import BitfieldMask
from tests.attention import cases, self_checks
from tests.attention import no_part as no_part_cases
from tests.attention.backends import compare
from tests.mask_strategies import mask_pairs
from tests.masks import triton_rule

check = partial(compare, "triton")


def known(name: str, dtype: torch.dtype = torch.float32, **options) -> None:
    check(*cases.masks()[name], dtype, **{"block": 32, "dim": 16, "heads": 2, "kv_heads": 1, **options})


def benchmark(name: str, dtype: torch.dtype, part: slice | None = None) -> None:
    """One of the benchmark's masks at 113 tokens, or `part` of its queries."""
    from bench.attention_masks import MASKS

    mask = MASKS[name](113)
    pair = (mask, None) if part is None else (mask.select(part), mask)
    check(*pair, dtype, block=32, dim=16, heads=2, kv_heads=1)


# Shrinking a failure would take minutes in the interpreter. The settings of tests/conftest.py do not apply here.
@settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    mask_pairs(longest=50),
    st.sampled_from([(2, 1), (2, 2)]),
    st.sampled_from([None, 3.0]),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([16, 5]),
)
def random_masks(masks, heads, softcap, cap, deterministic, value_dim):
    """Blocks of 16, so that 50 tokens make full, partial and empty ones; cap 1 splits every row that can be split."""
    small = dict(heads=heads[0], kv_heads=heads[1], block=16, dim=16, value_dim=value_dim)
    mask = masks[0]
    if mask.batch > 1:  # time is proportional to programs; one more batch row is enough to test strides
        masks = tuple(m if m is None else m.mapped(lambda tensor: tensor[:2]) for m in masks)
    check(*masks, torch.float32, softcap=softcap, cap=cap, deterministic=deterministic, **small)


def no_part(dtype: torch.dtype, poison: float, **options) -> None:
    options = {"block": 16, "dims": (16, 16), "heads": (1, 1), **options}
    no_part_cases.compare("triton", no_part_cases.small(), None, dtype, poison, **options)


@settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(mask_pairs(longest=50), st.sampled_from([None, 1]), st.booleans(), st.sampled_from(no_part_cases.POISONS))
def no_part_in_random_masks(masks, cap, deterministic, poison):
    options = dict(block=16, cap=cap, deterministic=deterministic, softcap=3.0 if deterministic else None)
    no_part_cases.compare("triton", *masks, torch.float32, poison, dims=(16, 5), heads=(2, 1), **options)


def without_gradient_of_lse() -> None:
    """Only the output is used: the backward gets no gradient of the LSE."""
    mask = BitfieldMask.causal(1, 70)
    q, k, v = cases.tensors(mask, None, 2, 2, 16, torch.float32)
    plan = AttentionPlan.build(mask, block=32)
    grads = torch.autograd.grad(bitfield_attention(q, k, v, plan, backend="triton").sum(), (q, k, v))
    wanted = torch.autograd.grad(bitfield_attention(q, k, v, plan, backend="reference").sum(), (q, k, v))
    for got, exact in zip(grads, wanted):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def strides() -> None:
    """q in HuggingFace's layout ([B, T, H, D] transposed), keys shared by expansion, values with strided columns."""
    mask = BitfieldMask.causal(2, 40)
    plan = AttentionPlan.build(mask, block=16)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 40, 2, 20, generator=generator).transpose(1, 2)
    k = torch.randn(2, 1, 40, 20, generator=generator).expand(2, 2, 40, 20)
    v = torch.randn(2, 2, 40, 40, generator=generator)[..., ::2]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    results = []
    for backend in ("triton", "reference"):
        out = bitfield_attention(q, k, v, plan, backend=backend)
        dout = torch.randn(2, 40, 2, 20, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def same_bits() -> None:
    """Two runs are bitwise equal, also with split rows; a plan that splits changes the result only by rounding."""
    mask = cases.masks()["multimodal"][0]
    results = []
    for cap in (None, 1, 1):
        q, k, v = cases.tensors(mask, None, 2, 1, 16, torch.float32)
        plan = AttentionPlan.build(mask, block=32, cap=cap)
        out, lse = bitfield_attention(q, k, v, plan, return_lse=True, backend="triton")
        results.append([out, lse, *torch.autograd.grad((out.sum() + lse[lse > -torch.inf].sum()), (q, k, v))])
    for whole, first, second in zip(*results):
        assert torch.equal(first, second)
        torch.testing.assert_close(whole, first, rtol=1e-4, atol=1e-5)


def atomics() -> None:
    """deterministic=False: dQ by atomics from every key block, for groups of heads and padded head dimensions.
    torch.use_deterministic_algorithms overrides it."""
    from interlace.attention import triton

    for name, dim in (("packed", 16), ("shuffled part", 24), ("empty rows", 5)):
        known(name, dim=dim, cap=2, softcap=3.0 if dim == 24 else None, deterministic=False)
    known("multimodal", torch.bfloat16, deterministic=False, dim=64)
    calls = []
    atomic_backward = triton.atomic_backward
    triton.atomic_backward = lambda *arguments: calls.append(1) or atomic_backward(*arguments)
    try:
        known("1 x 50", deterministic=False)
        assert len(calls) == 1
        torch.use_deterministic_algorithms(True)
        known("1 x 50", deterministic=False)
        assert len(calls) == 1
    finally:
        torch.use_deterministic_algorithms(False)
        triton.atomic_backward = atomic_backward


def reduced_over_ranks() -> None:
    """The sum in rank order is bitwise equal to the CPU's. A copy by few programs."""
    from interlace.comm.collectives.rows import reduce_in_order
    from interlace.kernels.ranks import copy_call, reduce_ranks_call

    generator = torch.Generator().manual_seed(0)
    for world, length in ((1, 7), (2, 2048), (3, 5000), (8, 100)):
        for dtype in (torch.float32, torch.float16):  # the interpreter truncates to bfloat16 instead of rounding
            parts = list(torch.randn(world, length, generator=generator).to(dtype))
            for op in ("sum", "mean"):
                out, wanted = torch.empty(2, length, dtype=dtype)
                reduce_in_order(parts, wanted, op)
                reduce_ranks_call(parts, out, mean=op == "mean").run()
                assert torch.equal(out, wanted), (world, dtype, op)
    source, to = torch.arange(10_000, dtype=torch.int32), torch.zeros(10_000, dtype=torch.int32)
    copy_call(to, source, 3).run()
    assert torch.equal(to, source)


def wide_key_gradients() -> None:
    """dk and dv before rounding: summed in one work item, from split rows, and with atomics.

    In fp16, since the interpreter truncates to bf16 instead of rounding.
    """
    mask = cases.masks()["packed"][0]
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 1, 16, torch.float16))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).half()
    for cap, deterministic in ((None, True), (1, True), (1, False)):
        options = (AttentionPlan.build(mask, block=32, cap=cap), 0.4, None)
        out, lse = run_forward(q, k, v, *options, "triton")
        arguments = (dout, None, q, k, v, out, lse, *options, deterministic, "triton")
        for rounded, wide in zip(run_backward(*arguments)[1:], run_backward(*arguments, wide=True)[1:]):
            assert wide.dtype == torch.float32 and torch.equal(rounded, wide.half())
            assert not torch.equal(rounded.float(), wide)


def same_lists(mask: BitfieldMask, keys: BitfieldMask | None, block: int) -> None:
    """Lists built by kernels equal those of AttentionPlan.build on the CPU, entry by entry."""
    from interlace.kernels.bitfield_plan import block_lists

    plan = AttentionPlan.build(mask, keys, block=block)
    tokens = [m.tokens()(torch.Tensor.contiguous) for m in (mask, mask if keys is None else keys)]
    ends = lambda *pointers: torch.stack([pointer[-1] for pointer in pointers])  # noqa: E731
    (*lists, q_doc, k_doc), (*numbers,) = block_lists(*tokens, mask.sinks, block, ends)
    assert torch.equal(q_doc, plan.q_doc) and torch.equal(k_doc, plan.k_doc)
    assert numbers == [int(pointer[-1]) for pointer in lists[::2]]
    same_maps(plan, mask.to_dense(keys))
    wanted = plan.tensors()[:8]
    for got, right in zip(lists, wanted):
        assert got.dtype == torch.int32
        assert torch.equal(got, right[: got.numel()]) and (right[got.numel() :] == -1).all(), (got, right)


def same_maps(plan: AttentionPlan, dense: torch.Tensor) -> None:
    """Bitmaps made by the kernel, and those of a plan on the CPU, equal the dense mask [B, Tq, Tk] bit by bit."""
    from interlace.kernels.bitfield_plan import map_calls

    if plan.block < 16:
        assert plan.part_q_map.shape[0] == plan.part_k_map.shape[0] == 0
        return
    size = plan.block
    short = (0, -dense.shape[2] % size, 0, -dense.shape[1] % size)
    tiles = torch.nn.functional.pad(dense, short).unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3)
    for side, blocks in (("q", plan.q_blocks), ("k", plan.k_blocks)):
        ptr, idx, maps = (getattr(plan, f"part_{side}_{name}") for name in ("ptr", "idx", "map"))
        made = torch.empty_like(maps)
        for call in map_calls(plan.queries(), plan.keys(), plan.sinks, size, ptr, idx, made, side == "q"):
            call.run()
        for row, (begin, end) in enumerate(zip(ptr.tolist(), ptr.tolist()[1:])):
            for entry in range(begin, end):
                other = int(idx[entry])
                place = (row % blocks, other) if side == "q" else (other, row % blocks)
                tile = tiles[(row // blocks, *place)]
                tile = tile if side == "q" else tile.T
                for bits in (maps[entry], made[entry]):
                    result = ((bits[:, :, None] >> torch.arange(min(32, size))) & 1).flatten(1).bool()
                    assert torch.equal(result[:size], tile) and torch.equal(result[size], tile.any(0)), (side, entry)


@settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(mask_pairs(longest=40), st.sampled_from([1, 3, 8, 16, 64]))
def random_lists(masks, block):
    same_lists(*masks, block)


def known_lists() -> None:
    for name in ("lambda", "blockwise", "shuffled part", "empty rows", "cross"):
        same_lists(*cases.masks()[name], 32)
    same_lists(BitfieldMask.full(2, 20), BitfieldMask.full(2, 0), 16)
    same_lists(BitfieldMask.full(2, 0), BitfieldMask.full(2, 20), 16)
    same_lists(
        BitfieldMask.causal(1, 20).select([0, 19]), BitfieldMask.causal(1, 150), 1
    )  # more key blocks than one program classifies or lists in a step


def one_synchronisation() -> None:
    """Building the lists reads from the device once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from interlace.kernels.bitfield_plan import block_lists

    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(function) or "nonzero" in str(function) or "masked_select" in str(function):
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    tokens = BitfieldMask.causal(2, 40).tokens()(torch.Tensor.contiguous)
    lists = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: lists.append(tensor.numel()) or tolist(tensor)
    try:
        with Reads():
            block_lists(tokens, tokens, 0, 16)
    finally:
        torch.Tensor.tolist = tolist
    assert lists == [2] and not reads, (lists, reads)


def nan_stays_in_its_row() -> None:
    """A NaN query gives a NaN row and does not affect other rows, as in scaled_dot_product_attention."""
    mask = BitfieldMask.causal(1, 40)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 1, 1, 16, torch.float32))
    q[0, 0, 33] = torch.nan
    out = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=16), backend="triton")
    assert out[0, 0, 33].isnan().all()
    assert not out[0, 0, :33].isnan().any() and not out[0, 0, 34:].isnan().any()


def without_maps() -> None:
    """A plan without bitmaps, as with too many PARTIAL blocks, gives bitwise equal results."""
    for name, block in (("multimodal", 32), ("113 x 203", 64), ("empty rows", 16)):
        mask, keys = cases.masks()[name]
        plan = AttentionPlan.build(mask, keys, block=block)
        results = []
        for used in (plan, replace(plan, part_q_map=plan.part_q_map[:0], part_k_map=plan.part_k_map[:0])):
            q, k, v = cases.tensors(mask, keys, 2, 1, 16, torch.float32)
            out, lse = bitfield_attention(q, k, v, used, return_lse=True, backend="triton")
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
            results.append([out, lse, *torch.autograd.grad(out, (q, k, v), dout)])
        assert plan.part_q_map.shape[0] == plan.part_q_idx.numel()
        for mapped, computed in zip(*results):
            assert torch.equal(mapped, computed)


def maps_of_compiled_plans() -> None:
    """Plans made by the op have bitmaps if all blocks of the score matrix may have one; both variants are correct."""
    from interlace.attention import _blocks
    from interlace.attention.plan import traced_plan

    mask = cases.masks()["multimodal"][0]
    tokens = mask.tokens()(torch.Tensor.contiguous)
    given = AttentionPlan.build(mask, block=16)
    assert given.part_q_map.shape[0] == AttentionPlan.build(mask, block=16, device="cpu").part_q_map.shape[0] > 0
    most = _blocks.MAPPED_BLOCKS
    try:
        for room, mapped in ((most, True), (1, False)):
            _blocks.MAPPED_BLOCKS = room
            plan = traced_plan(tokens, tokens, mask.sinks, 16)
            assert (plan.part_q_map.shape[0] > 0) == (plan.part_k_map.shape[0] > 0) == mapped
            q, k, v = cases.tensors(mask, None, 2, 1, 16, torch.float32)
            out, wanted = (bitfield_attention(q, k, v, used, backend="triton") for used in (plan, given))
            assert torch.equal(out, wanted)
    finally:
        _blocks.MAPPED_BLOCKS = most


def short_lengths() -> None:
    """Lengths 1 to 48, some query lengths with all of some key lengths: only the last blocks are short."""
    for q_length in range(1, 49, 5):
        for k_length in range(q_length, 49, 7):
            causal_of(q_length, k_length, 16)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([32, 64, 128]))
def long_lengths(one, other, block):
    """Lengths 1 to 400, with the block sizes of a GPU too."""
    causal_of(min(one, other), max(one, other), block)


def causal_of(q_length: int, k_length: int, block: int) -> None:
    """The last queries of a causal sequence."""
    mask = BitfieldMask.causal(1, k_length)
    queries = mask.select(slice(k_length - q_length, k_length))
    check(queries, mask, torch.float32, block=block, dim=16, heads=1, kv_heads=1)


def no_keys() -> None:
    """Zero keys: every row is empty."""
    mask, keys = BitfieldMask.full(1, 20), BitfieldMask.full(1, 0)
    q, k, v = cases.tensors(mask, keys, 2, 2, 16, torch.float32)
    out, lse = bitfield_attention(q, k, v, AttentionPlan.build(mask, keys, block=16), return_lse=True, backend="triton")
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -torch.inf))
    for grad in torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True):
        assert grad is None or not grad.isnan().any()


def refuses() -> None:
    """Inputs that the kernels do not support are refused with the reason."""
    from interlace.attention.op import unsupported

    assert unsupported("triton", torch.zeros(1, 1, 16, 16)) is None
    assert "head dimensions up to 256, not 272" in str(unsupported("triton", torch.zeros(1, 1, 16, 272)))
    assert "float64" in str(unsupported("triton", torch.zeros(1, 1, 16, 16, dtype=torch.float64)))
    mask = BitfieldMask.causal(1, 48)
    q, k, v = cases.tensors(mask, None, 1, 1, 16, torch.float32)
    for block in (8, 48):
        try:
            bitfield_attention(q, k, v, AttentionPlan.build(mask, block=block), backend="triton")
        except ValueError as error:
            assert "power of two from 16" in str(error), error
        else:
            raise AssertionError(f"block {block} was accepted")


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(known, name) for name in cases.masks()},
    "heads 4:2, capped scores": partial(known, "packed", heads=4, kv_heads=2, softcap=2.5),
    "heads 4:1": partial(known, "causal", heads=4),
    "head dimension 72": partial(known, "multimodal", dim=72),
    "head dimension 80, split": partial(known, "113 x 203", dim=80, cap=2),
    "head dimension 96, fp16": partial(known, "window", torch.float16, dim=96),
    "head dimension 256": partial(known, "prefix", dim=256, heads=1, block=64),
    "head dimension 5": partial(known, "1 x 50", dim=5),
    "bf16": partial(known, "multimodal", torch.bfloat16, dim=64),
    "bf16, capped scores, split": partial(known, "lambda", torch.bfloat16, softcap=2.0, cap=1),
    "fp16": partial(known, "shared question", torch.float16),
    "split": partial(known, "full", cap=1, heads=4, kv_heads=2),
    "split, empty rows": partial(known, "empty rows", cap=1, block=16),
    "several tiles per block": partial(known, "packed", block=128),
    "several tiles per block, split": partial(known, "shuffled part", block=64, cap=1),
    "negative scale": partial(known, "blockwise", scale=-0.3),
    "zero scale": partial(known, "1 x 50", scale=0.0),
    "values of 128 beside 192": partial(known, "causal", dim=192, value_dim=128, heads=1, block=64, scale=0.07),
    "values wider than keys, split": partial(known, "packed", dim=16, value_dim=40, cap=1, block=64),
    "values of 64 beside 96, bf16": partial(known, "window", torch.bfloat16, dim=96, value_dim=64, scale=0.1),
    "values of 5 beside 9, fp16, atomics": partial(
        known, "shared question", torch.float16, dim=9, value_dim=5, deterministic=False
    ),
    "NaN where nobody looks": partial(no_part, torch.float32, torch.nan, heads=(2, 1)),
    "NaN where nobody looks, split, atomics": partial(
        no_part, torch.float16, torch.nan, dims=(16, 8), cap=1, deterministic=False
    ),
    "infinity where nobody looks, capped": partial(no_part, torch.float32, torch.inf, softcap=2.0),
    "random masks": random_masks,
    "no gradient of the LSE": without_gradient_of_lse,
    "strides": strides,
    "same bits": same_bits,
    "atomics": atomics,
    "reduced over ranks": reduced_over_ranks,
    "wide key gradients": wide_key_gradients,
    "lists of known masks": known_lists,
    "lists of random masks": random_lists,
    "lists read the device once": one_synchronisation,
    "without maps": without_maps,
    "short lengths": short_lengths,
    "lengths up to 400": long_lengths,
    "maps of compiled plans": maps_of_compiled_plans,
    "NaN": nan_stays_in_its_row,
    "no keys": no_keys,
    "refuses": refuses,
    **self_checks.CASES,
}


# Masks of the benchmark x types and shapes, and random ones, which take minutes in the interpreter.
# Marked slow: most of their coverage overlaps with the other cases.
SLOW = {
    "full", "wide key gradients", "split, empty rows", "several tiles per block, split", "lists of known masks",
    "values wider than keys, split", "values of 64 beside 96, bf16", "head dimension 80, split", "heads 4:1",
    "lists of random masks", "atomics", "random masks", "bf16, capped scores, split", "split",
    "same bits", "several tiles per block", "negative scale", "head dimension 72", "head dimension 96, fp16",
    "head dimension 256", "prefix", "blockwise", "shared question", "1 x 50", "50 x 1", "zero scale",
    "values of 5 beside 9, fp16, atomics", "NaN where nobody looks, split, atomics",
    "infinity where nobody looks, capped", "short lengths", "lengths up to 400", "no gradient of the LSE", "113 x 203",
}  # fmt: skip
LONG_CASES: dict[str, Callable[[], None]] = {
    f"{name}, {dtype}, {'whole' if part is None else 'part'}": partial(benchmark, name, getattr(torch, dtype), part)
    for name in ("packed_images", "sliding_window", "document_causal", "prefix_lm", "shared_question", "lambda",
                 "causal_blockwise", "cornstarch_ep", "cornstarch_ee", "cornstarch_mp", "gemma3_images", "video")
    for dtype, part in (("float32", None), ("bfloat16", slice(40, 97)), ("float16", slice(112, 113)))
}  # fmt: skip
LONG_CASES["NaN where nobody looks in random masks"] = no_part_in_random_masks


class Worker:
    """Interpreter process, used as a context manager."""

    process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def _start(self) -> subprocess.Popen[str]:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root / "python"), str(root)])
        return subprocess.Popen(
            [sys.executable, "-m", "tests.attention.interpreter"],
            cwd=root,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str) -> str | None:
        """The error of this case, or None."""
        self.process = self.process or self._start()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            assert answer, f"the interpreter process ended with status {self.process.wait()}"
        except BaseException:  # after a timeout an answer is still outstanding: the next test needs a new process
            self.__exit__()
            raise
        return json.loads(answer)

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a case must not be parsed as an answer
    for line in sys.stdin:
        try:
            (CASES | LONG_CASES | triton_rule.CASES)[line.rstrip("\n")]()
            problem = None
        except Exception:  # reported to the requesting test
            problem = traceback.format_exc()
        answers.write(json.dumps(problem) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
