"""One case of `bench.attention`: a mask at a length; every contender is checked, then timed in alternation."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.attention_peers import INTERLACE, Contender, Problem, sampled_rows, visible_pairs
from bench.measure import Clock, out_of_memory, reason

BACKWARD_FLOPS = 2.5  # five products against two in the forward
TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of ||a - b|| / ||b||
GRADIENTS = 2.0  # times the tolerance of the output
LEAST_ROUNDS = 3

Record = dict[str, Any]


class Rounds(NamedTuple):
    """At most `most` rounds, and about `seconds` of measured calls per contender, but never under LEAST_ROUNDS."""

    most: int
    seconds: float


class Trial(NamedTuple):
    """One forward and backward: the results, and the milliseconds of each."""

    out: Tensor
    grads: tuple[Tensor, ...] | None
    forward: float
    backward: float | None


class Runner(NamedTuple):
    contender: Contender
    state: Any  # what contender.build returned


def run_case(
    problem: Problem,
    peers: Sequence[Contender],
    clock: Clock,
    rounds: Rounds | None,
    skip: Mapping[str, str],
    peak: float,
) -> Record:
    """Check all contenders, time the correct ones (rounds None: time nothing) and return the case's record.

    skip: peer -> reason why it does not run here. peak: TFLOP/s of a matrix product.
    """
    pairs = visible_pairs(problem.mask)
    records: dict[str, Record] = {}
    case: Record = {
        "mask": problem.name,
        "length": problem.length,
        "visible_pairs": pairs,
        "density": pairs / problem.length**2,
        "contenders": records,
    }
    records[INTERLACE.name], state, ours = _try_out(INTERLACE, problem, None, clock)
    if ours is None:
        return case | {"ratio": {}}
    case["plan"] = state.stats()._asdict() | {"block": state.block}
    runners = [Runner(INTERLACE, state)]
    for peer in peers:
        if peer.name in skip:
            records[peer.name] = {"status": "not applicable", "reason": skip[peer.name]}
            continue
        records[peer.name], state, trial = _try_out(peer, problem, ours, clock)
        if trial is not None:
            runners.append(Runner(peer, state))
        del trial, state
        release(clock)
    del ours
    if rounds is not None:
        _time(runners, problem, records, clock, rounds)
        for record in records.values():
            _summarise(record, 4 * pairs * problem.q.shape[1] * problem.q.shape[3], peak)
    mine = records[INTERLACE.name]
    result = {name: _ratios(record, mine) for name, record in records.items() if name != INTERLACE.name}
    return case | {"ratio": {name: ratio for name, ratio in result.items() if ratio}}


def release(clock: Clock) -> None:
    """Free the memory of deleted tensors, so that the cache of one contender does not limit the next."""
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()


def _run(runner: Runner, problem: Problem, clock: Clock) -> Trial:
    contender, state = runner
    if not contender.trains(problem):
        with torch.no_grad():
            out, forward = clock(lambda: contender.forward(problem, state))
        return Trial(out, None, forward, None)
    out, forward = clock(lambda: contender.forward(problem, state))
    grads, backward = clock(lambda: torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.dout))
    return Trial(out.detach(), grads, forward, backward)


def _try_out(
    contender: Contender, problem: Problem, ours: Trial | None, clock: Clock
) -> tuple[Record, Any, Trial | None]:
    """(record, state, trial): build, warm up, measure memory and compare; no trial if the result is wrong.

    ours: reference for the peers; None for our own op, which is compared with exact rows.
    """
    if (why := contender.why_not(problem)) is not None:
        return {"status": "not applicable", "reason": why}, None, None
    record: Record = {"status": "ok"}
    try:
        before = torch.cuda.memory_allocated() if clock.cuda else 0
        runner = Runner(contender, contender.build(problem))
        if clock.cuda:
            record["mask_bytes"] = torch.cuda.memory_allocated() - before
        _run(runner, problem, clock)  # compiles
        if clock.cuda:
            clock.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        trial = _run(runner, problem, clock)
        if clock.cuda:
            results = trial.out.nbytes + sum(grad.nbytes for grad in trial.grads or ())
            record["extra_bytes"] = torch.cuda.max_memory_allocated() - before - results
        record["difference"] = errors = _compare(trial, problem, ours)
    except Exception as error:  # an exception is the contender's result, not the end of the benchmark
        status = "out of memory" if out_of_memory(error) else "failed"
        return record | {"status": status, "reason": reason(error)}, None, None
    tolerance = TOLERANCE[problem.q.dtype]
    bad = [name for name, error in errors.items() if not error <= tolerance * (1 if name == "out" else GRADIENTS)]
    if bad:  # NaN included
        why = ", ".join(f"{name} differs by {errors[name]:.2g}" for name in bad)
        return record | {"status": "wrong", "reason": why}, None, None
    return record, runner.state, trial


def _compare(trial: Trial, problem: Problem, ours: Trial | None) -> dict[str, float]:
    if ours is None:
        rows, exact = sampled_rows(problem)
        return {"out": _difference(trial.out[:, :, rows], exact)}
    errors = {"out": _difference(trial.out, ours.out)}
    for name, one, other in zip(("dq", "dk", "dv"), trial.grads or (), ours.grads or ()):
        errors[name] = _difference(one, other)
    return errors


def _difference(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted|| in fp32, head by head to avoid an fp32 copy of the whole tensor."""
    square, size = 0.0, 0.0
    for one, other in zip(got.unbind(1), wanted.unbind(1)):
        square += float((one.float() - other.float()).square().sum())
        size += float(other.float().square().sum())
    return (square / max(size, 1e-30)) ** 0.5


def _time(
    runners: Sequence[Runner], problem: Problem, records: dict[str, Record], clock: Clock, rounds: Rounds
) -> None:
    """Fill in build_ms and the samples: round robin, so that all contenders run under the same machine load."""
    left: dict[str, int] = {}
    for runner in runners:
        record = records[runner.contender.name]
        try:
            warm = _run(runner, problem, clock)
            build = clock.wall(lambda: runner.contender.build(problem), repeats=3)  # noqa: B023 it is called at once
        except Exception as error:
            record |= {"status": "out of memory" if out_of_memory(error) else "failed", "reason": reason(error)}
            continue
        once = (warm.forward + (warm.backward or 0.0)) / 1e3
        left[runner.contender.name] = max(LEAST_ROUNDS, min(rounds.most, int(rounds.seconds / max(once, 1e-6))))
        record |= {"build_ms": build, "forward_samples": [], "backward_samples": []}
        del warm
    for turn in range(max(left.values(), default=0)):
        for runner in runners:
            if turn >= left.get(runner.contender.name, 0):
                continue
            record = records[runner.contender.name]
            try:
                trial = _run(runner, problem, clock)
            except Exception as error:
                record |= {"status": "out of memory" if out_of_memory(error) else "failed", "reason": reason(error)}
                del left[runner.contender.name]
                release(clock)
                continue
            record["forward_samples"].append(trial.forward)
            if trial.backward is not None:
                record["backward_samples"].append(trial.backward)
            del trial


def _summarise(record: Record, flops: int, peak: float) -> None:
    """Add medians, TFLOP/s and the share of the matmul peak to a timed record. flops: of the forward."""
    if record["status"] != "ok":
        return
    work = {"forward": 1.0, "backward": BACKWARD_FLOPS}
    for which in ("forward", "backward"):
        if record[f"{which}_samples"]:
            record[f"{which}_ms"] = statistics.median(record[f"{which}_samples"])
    if "backward_ms" in record:
        record["total_ms"] = record["forward_ms"] + record["backward_ms"]
        work["total"] = 1 + BACKWARD_FLOPS
    for which in work:
        if f"{which}_ms" in record:
            record[f"{which}_with_build_ms"] = record[f"{which}_ms"] + record["build_ms"]
            record[f"{which}_tflops"] = work[which] * flops / record[f"{which}_ms"] / 1e9
            record[f"{which}_share_of_peak"] = record[f"{which}_tflops"] / peak


def _ratios(other: Record, mine: Record) -> dict[str, float]:
    """Other's time / mine for everything that was timed for both."""
    keys = ("forward_ms", "backward_ms", "total_ms", "forward_with_build_ms", "total_with_build_ms")
    if other["status"] != "ok" or mine["status"] != "ok":
        return {}
    return {key.removesuffix("_ms"): other[key] / mine[key] for key in keys if key in other and key in mine}
