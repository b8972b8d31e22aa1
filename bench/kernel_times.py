"""Times of single attention kernels on a GPU, arm by arm: tiles, the fused backward, Gluon, and peers in the same run.

    python -m bench.kernel_times [--cases full:32768:128 causal:8192:128] [--out bench/results/kernel_times.json]
    python -m bench.kernel_times --compile     compile every arm in parallel processes and time nothing
    python -m bench.kernel_times --flex 2      FlexAttention on the first two cases too (some 40 s of compilation each)
    python -m bench.kernel_times --dry         the same lines without a GPU, on meta tensors: nothing is launched

A case is mask:length:head dimension, 16 query heads over 4 key heads, bf16. Each arm is one launch (forward, dQ, or
dK/dV), without autograd and after an L2 flush; the median of five. Results are compared with those of the default arm
(first in each list). "as PARTIAL" processes every FULL block as a PARTIAL one. The result is the same; the time
difference is the cost of the mask, by bitmaps or computed. TFLOP/s are over visible pairs: 2 products forward, 3 for
dQ, 4 for dK/dV, 5 fused. cuDNN and FlashAttention are torch's own, for masks that they support.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.attention_peers import PEERS, Problem, visible_pairs
from bench.measure import Clock, command, device, machine, matmul_peak, reason, versions, write_json
from interlace.attention import AttentionPlan
from interlace.attention.plan import MAPS
from interlace.kernels import bitfield_launch as launch
from interlace.kernels.bitfield_tiles import FORWARD, FUSED_GRADIENT, KEY_GRADIENT, QUERY_GRADIENT, Tile

HEADS, KV_HEADS = 16, 4
CASES = (
    "full:32768:128", "causal:8192:128", "cornstarch_mp:32768:128", "causal:32768:128", "gemma3_images:8192:256",
    "causal:16384:64",
)  # fmt: skip
GLUON_QUERY_GRADIENT, GLUON_KEY_GRADIENT = f"gluon_{QUERY_GRADIENT}", f"gluon_{KEY_GRADIENT}"
PRODUCTS = {
    FORWARD: 2, "gluon": 2, QUERY_GRADIENT: 3, GLUON_QUERY_GRADIENT: 3, KEY_GRADIENT: 4, GLUON_KEY_GRADIENT: 4,
    FUSED_GRADIENT: 5,
}  # fmt: skip
LIKE = {"gluon": FORWARD, GLUON_QUERY_GRADIENT: QUERY_GRADIENT, GLUON_KEY_GRADIENT: KEY_GRADIENT}
"""Kernels in Gluon: the Triton kernel that computes the same."""
# Tiles to measure beside the default one, by kernel and head dimension.
TILES: dict[str, dict[int, list[Tile]]] = {
    FORWARD: {
        64: [Tile(128, 64, 4, 2), Tile(128, 64, 4, 3)],
        128: [Tile(128, 64, 8, 2), Tile(128, 64, 8, 4), Tile(64, 64, 4, 3)],
        256: [Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 32, 8, 3)],
    },
    QUERY_GRADIENT: {
        64: [Tile(128, 64, 8, 2), Tile(64, 64, 4, 3)],
        128: [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)],
        256: [Tile(64, 32, 4, 2), Tile(64, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 64, 4, 1)],
    },
    KEY_GRADIENT: {
        64: [Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 128, 8, 3), Tile(64, 128, 8, 3)],
        128: [Tile(32, 128, 8, 3), Tile(32, 128, 8, 4), Tile(64, 128, 8, 2), Tile(32, 64, 4, 3), Tile(32, 128, 4, 3)],
        256: [Tile(32, 128, 8, 2), Tile(32, 64, 8, 2), Tile(64, 128, 8, 2)],
    },
    FUSED_GRADIENT: {64: [Tile(64, 128, 8, 2)], 128: [Tile(32, 128, 8, 2), Tile(32, 128, 8, 3)]},
}


class Case:
    """Tensors of one mask: q, dout [1, 16, T, D], k, v [1, 4, T, D] in bf16, and the results of a forward."""

    def __init__(self, text: str, at: torch.device, length: int = 0) -> None:
        self.text = text
        name, tokens, dim = text.split(":")
        self.length, self.dim = length or int(tokens), int(dim)
        where = torch.device("cpu") if at.type == "meta" else at
        problem = Problem.make(
            name, self.length, heads=HEADS, kv_heads=KV_HEADS, head_dim=self.dim, dtype=torch.bfloat16, device=where
        )
        self.problem, self.plan = problem, AttentionPlan.build(problem.mask)
        names = [(f"full_{side}_{part}", f"part_{side}_{part}") for side in "qk" for part in ("ptr", "idx")]
        swapped = {name: getattr(self.plan, other) for a, b in names for name, other in ((a, b), (b, a))}
        self.all_partial = replace(self.plan, **swapped).with_maps()
        computed = {name: getattr(self.all_partial, name)[:0] for name in MAPS}
        self.all_computed = replace(self.all_partial, **computed)
        self.has_partial = bool((self.plan.part_q_ptr[-1] > 0).item())
        self.q, self.k, self.v, self.dout = (x.detach() for x in (problem.q, problem.k, problem.v, problem.dout))
        self.scale = self.dim**-0.5
        if at.type == "meta":
            self.plan = self.plan.to("meta")
            self.q, self.k, self.v, self.dout = (x.to("meta") for x in (self.q, self.k, self.v, self.dout))
        self.out, self.lse = torch.empty_like(self.q), torch.empty(self.q.shape[:3], device=at)

    def calls(self, kernel: str, tile: Tile | None, plan: Any) -> tuple[list[launch.Call], list[torch.Tensor]]:
        """(launches of the pass that contains `kernel`, its results), with another tile for that kernel."""
        chosen = launch.choose

        def choose(which: str, *arguments: Any, **options: Any) -> Tile:
            return tile if tile and which == kernel else chosen(which, *arguments, **options)

        architecture = 90 if self.q.is_meta else launch.architecture_of(self.q.device)
        q, k, v, dout = self.q, self.k, self.v, self.dout
        with mock.patch.object(launch, "choose", choose):
            if kernel == "gluon":
                from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls

                out, lse = torch.empty_like(self.out), torch.empty_like(self.lse)
                return gluon_forward_calls(q, k, v, plan, out, lse, self.scale, None), [out, lse]
            if kernel == FORWARD:
                out, lse = torch.empty_like(self.out), torch.empty_like(self.lse)
                return launch.forward_calls(q, k, v, plan, out, lse, self.scale, None, architecture), [out, lse]
            fused = kernel == FUSED_GRADIENT
            dq = torch.zeros_like(q, dtype=torch.float32) if fused else torch.empty_like(q)
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            given = (dout, None, q, k, v, self.out, self.lse, plan, dq, dk, dv, self.scale)
            if kernel in LIKE:
                from interlace.kernels.bitfield_gluon_backward_launch import gluon_backward_calls

                calls = gluon_backward_calls(*given)
            else:
                calls = launch.backward_calls(*given, None, architecture, fused=fused)
        results = {QUERY_GRADIENT: [dq], KEY_GRADIENT: [dk, dv], FUSED_GRADIENT: [dq, dk, dv]}
        return calls, results[LIKE.get(kernel, kernel)]

    def arms(self, ships: bool = False) -> Iterator[tuple[str, str, Tile | None, Any]]:
        """(kernel, label, tile, plan), the default first. ships: without other tiles."""
        for kernel in PRODUCTS:
            fused = kernel == FUSED_GRADIENT
            if (self.dim > 128 and (fused or kernel in LIKE)) or (fused and ships):
                continue
            if not fused:  # which has no tile on Hopper
                yield kernel, "ships", None, self.plan
            if not self.has_partial and not fused:
                yield kernel, "as PARTIAL", None, self.all_partial
                if kernel not in (GLUON_QUERY_GRADIENT, GLUON_KEY_GRADIENT):  # which read bitmaps
                    yield kernel, "as PARTIAL, computed", None, self.all_computed
            for tile in TILES.get(kernel, {}).get(self.dim, []) if not ships else ():
                yield kernel, "x".join(map(str, tile)), tile, self.plan


NAMES = {"gluon": "gluon_forward_kernel", FUSED_GRADIENT: "key_gradient_kernel"}


def launches(kernel: str, calls: list[launch.Call]) -> list[launch.Call]:
    """The timed launches; those before (delta) and after them (sums of split rows) only run."""
    return [call for call in calls if call.kernel.__name__ == NAMES.get(kernel, f"{kernel}_kernel")]


def time_arm(case: Case, kernel: str, tile: Tile | None, plan: Any, clock: Clock, repeats: int) -> dict[str, Any]:
    calls, results = case.calls(kernel, tile, plan)
    timed = launches(kernel, calls)
    first = timed[0]
    found: dict[str, Any] = {
        "tile": [first.arguments.get("BLOCK_M"), first.arguments.get("BLOCK_N"), first.warps, first.stages]
    }
    compiled = None
    for call in calls:
        if not call.programs:
            continue
        made = call.kernel[(call.programs,)](**call.arguments, **call.options)
        compiled = made if call is first else compiled
    torch.cuda.synchronize()
    for attribute in ("n_regs", "n_spills"):
        found[attribute] = getattr(compiled, attribute, None)
    found["results"] = [result.clone() for result in results]

    def run() -> None:
        for call in timed:
            call.run()

    once = clock(run)[1]
    times = [clock(run)[1] for _ in range(min(repeats, max(3, int(150 / once))))]
    return found | {"ms": statistics.median(times)}


def difference(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest ||a - b|| / ||b||, head by head; NaN if either contains NaN."""
    worst = torch.zeros((), device=mine[0].device)
    for one, other in zip(mine, wanted, strict=True):
        for a, b in zip(one.unbind(1), other.unbind(1), strict=True):
            error = (a.float() - b.float()).norm() / b.float().norm()
            worst = torch.maximum(worst, error) if not error.isnan() else error
    return float(worst)


def peers(case: Case, clock: Clock, flex: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of whole forwards and backwards (autograd's overhead hidden): {peer: {forward_ms, backward_ms}}."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    problem, name = case.problem, case.problem.name
    result: dict[str, Any] = {}
    todo: dict[str, tuple[str, Any]] = {}
    if name in ("full", "causal"):
        todo = {
            "cudnn": (f"sdpa_{name}", SDPBackend.CUDNN_ATTENTION),
            "flash": (f"sdpa_{name}", SDPBackend.FLASH_ATTENTION),
        }
    if flex:
        todo["flex_formula"] = ("flex_formula", None)
    for label, (peer, backend) in todo.items():
        contender = PEERS[peer]
        try:
            state = contender.build(problem)

            def forward(contender: Any = contender, state: Any = state, backend: Any = backend) -> torch.Tensor:
                if backend is None:
                    return contender.forward(problem, state)
                with sdpa_kernel(backend):
                    return contender.forward(problem, state)

            def backward(out: torch.Tensor) -> Any:
                return torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.dout)

            times: dict[str, list[float]] = {"forward_ms": [], "backward_ms": []}
            for turn in range(repeats + 1):
                out, ms = clock(forward)
                _, back = clock(lambda out=out: backward(out))
                if turn:
                    times["forward_ms"].append(ms)
                    times["backward_ms"].append(back)
            result[label] = {key: statistics.median(values) for key, values in times.items()}
            result[label]["difference"] = difference([out.detach()], [case.out])
        except Exception as error:
            result[label] = {"failed": reason(error)}
    return result


def measure(text: str, at: torch.device, clock: Clock, flex: bool, repeats: int, ships: bool) -> dict[str, Any]:
    """The record of one case."""
    case = Case(text, at)
    pairs = visible_pairs(case.problem.mask)
    stats = case.plan.stats()._asdict()
    record: dict[str, Any] = {"case": text, "visible_pairs": pairs, "plan": stats, "arms": []}
    shipped: dict[str, list[torch.Tensor]] = {}
    for kernel, label, tile, plan in case.arms(ships):
        row: dict[str, Any] = {"kernel": kernel, "arm": label}
        try:
            row |= time_arm(case, kernel, tile, plan, clock, repeats)
            results = row.pop("results")
            if kernel == FORWARD and label == "ships":
                case.out, case.lse = results
            like = LIKE.get(kernel, kernel)
            wanted = shipped.setdefault(like, results)
            row["difference"] = difference(results[:1], wanted[:1]) if like == FORWARD else difference(results, wanted)
            row["tflops"] = PRODUCTS[kernel] * 2 * pairs * HEADS * case.dim / row["ms"] / 1e9
        except Exception as error:
            row["failed"] = reason(error)
        record["arms"].append(row)
        said = (
            row.get("failed") or f"{row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s  differs by {row['difference']:.1e}"
        )
        print(
            f"{text:26} {kernel:20} {label:12} {said}  {row.get('n_regs')} registers, {row.get('n_spills')} spilled",
            flush=True,
        )
    record["peers"] = peers(case, clock, flex, repeats)
    for label, peer in record["peers"].items():
        if "forward_ms" in peer:
            work = 4 * pairs * HEADS * case.dim / 1e9
            peer["forward_tflops"], peer["backward_tflops"] = (
                work / peer["forward_ms"],
                2.5 * work / peer["backward_ms"],
            )
        print(f"{text:26} {label}: {peer}", flush=True)
    return record


def compile_one(job: tuple[str, int]) -> str:
    """Compile the n-th arm of a case into Triton's cache by running it at a short length."""
    text, index = job
    torch.cuda.set_device(0)
    case = Case(text, torch.device("cuda", 0), length=1024)
    arms = list(case.arms())
    if index >= len(arms):
        return ""
    kernel, label, tile, plan = arms[index]
    try:
        for call in case.calls(kernel, tile, plan)[0]:
            call.run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{text} {kernel} {label}: {reason(error)}"
    return ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--compile", action="store_true", help="fill Triton's cache and time nothing")
    parser.add_argument("--ships", action="store_true", help="no other tiles than those that ship")
    parser.add_argument("--flex", type=int, default=0, metavar="N", help="FlexAttention on the first N cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--dry", action="store_true", help="no GPU: make every launch on meta tensors")
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernel_times.json"))
    options = parser.parse_args(argv)
    if options.dry:
        for text in options.cases:
            case = Case(text, torch.device("meta"), length=1024)
            arms = [(kernel, label, launches(kernel, case.calls(kernel, tile, plan)[0])[0].programs)
                    for kernel, label, tile, plan in case.arms() if label != "as PARTIAL"]  # fmt: skip
            print(text, len(arms), "arms", arms[0], flush=True)
        return
    if device().type != "cuda":
        parser.error("there is no CUDA GPU; --dry makes the same launches on meta tensors")
    if options.compile:
        dims = list({text.rsplit(":", 1)[1]: text for text in options.cases}.values())
        jobs = [(text, index) for index in range(32) for text in ["full:1024:" + t.rsplit(":", 1)[1] for t in dims]]
        with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for said in pool.map(compile_one, jobs):
                if said:
                    print(said, flush=True)
        return
    at = torch.device("cuda", 0)
    clock = Clock(at)
    report: dict[str, Any] = {
        "benchmark": "kernel_times", "command": command("kernel_times", argv), "machine": machine(at),
        "versions": versions(), "heads": [HEADS, KV_HEADS], "peak": matmul_peak(clock, torch.bfloat16), "cases": [],
    }  # fmt: skip
    print(report["machine"], report["versions"], report["peak"], flush=True)
    for number, text in enumerate(options.cases):
        report["cases"].append(measure(text, at, clock, number < options.flex, options.repeats, options.ships))
        write_json(options.out, report)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
