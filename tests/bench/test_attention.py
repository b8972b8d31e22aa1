"""Attention benchmark: its counts, its refusal to time wrong results, and its CUDA paths on stubs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from bench import attention, attention_case, attention_memory, subblocks
from bench.attention_case import Rounds, run_case
from bench.attention_masks import MASKS
from bench.attention_peers import PEERS, Contender, Problem, dense_mask, sampled_rows, visible_pairs
from bench.attention_report import main as show
from bench.measure import Clock, parse_heads
from interlace.attention import AttentionPlan
from tests.attention import cases

CPU = torch.device("cpu")


def problem(name: str = "packed_images", length: int = 90) -> Problem:
    return Problem.make(name, length, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", MASKS)
def test_pairs_and_dense_masks(name, monkeypatch):
    monkeypatch.setattr("bench.attention_peers.PAIRS_AT_ONCE", 7 * 90)  # several pieces, the last one shorter
    mask = MASKS[name](90)
    assert torch.equal(dense_mask(mask)[:, 0], mask.to_dense())
    assert visible_pairs(mask) == int(mask.to_dense().sum())


def test_sampled_rows_are_exact():
    p = problem()
    rows, got = sampled_rows(p, 20)
    wanted, _ = cases.oracle(p.q, p.k, p.v, p.mask.to_dense(), 8**-0.5)
    assert rows[0] == 0 and rows[-1] == 89
    torch.testing.assert_close(got.double(), wanted[:, :, rows], atol=1e-5, rtol=1e-5)


def test_a_case_is_checked_timed_and_compared():
    case = run_case(problem("causal"), list(PEERS.values())[:3], Clock(CPU), Rounds(4, 1.0), {"sdpa_full": "no"}, 0.5)
    mine, dense = case["contenders"]["interlace"], case["contenders"]["sdpa_dense"]
    assert case["visible_pairs"] == 90 * 91 // 2
    assert len(mine["forward_samples"]) == len(dense["backward_samples"]) == 4
    assert mine["total_ms"] == pytest.approx(mine["forward_ms"] + mine["backward_ms"])
    assert mine["forward_tflops"] == pytest.approx(4 * 90 * 91 // 2 * 8 * 4 / mine["forward_ms"] / 1e9)
    assert mine["backward_tflops"] == pytest.approx(2.5 * 4 * 90 * 91 // 2 * 8 * 4 / mine["backward_ms"] / 1e9)
    assert mine["forward_share_of_peak"] == pytest.approx(mine["forward_tflops"] / 0.5)
    assert case["ratio"]["sdpa_dense"]["total"] == pytest.approx(dense["total_ms"] / mine["total_ms"])
    assert case["contenders"]["sdpa_full"] == {"status": "not applicable", "reason": "no"}


def test_wrong_or_failing_contenders_are_listed_but_not_timed():
    def exhausted(problem, state):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(problem, state):
        raise RuntimeError("no such\nkernel")

    dense = PEERS["sdpa_dense"]
    peers = [
        Contender("doubled", dense.why_not, dense.build, lambda p, mask: 2 * dense.forward(p, mask)),
        Contender("nan", dense.why_not, dense.build, lambda p, mask: torch.nan * dense.forward(p, mask)),
        Contender("exhausted", dense.why_not, dense.build, exhausted),
        Contender("broken", dense.why_not, dense.build, broken),
    ]
    case = run_case(problem(), peers, Clock(CPU), Rounds(3, 1.0), {}, 1.0)
    result = {name: (record["status"], "forward_ms" in record) for name, record in case["contenders"].items()}
    assert result == {
        "interlace": ("ok", True),
        "doubled": ("wrong", False),
        "nan": ("wrong", False),
        "exhausted": ("out of memory", False),
        "broken": ("failed", False),
    }
    assert case["contenders"]["broken"]["reason"] == "RuntimeError: no such kernel" and case["ratio"] == {}


def test_our_own_failure_is_the_exit_status(tmp_path):
    out = tmp_path / "a.json"
    report = attention.main(
        ["--preset", "smoke", "--masks", "causal", "--backend", "nonsense", "--no-memory", "--out", str(out)]
    )
    assert "nonsense" in attention.failures(report)[0]
    assert json.loads(out.read_text())["cases"][0]["contenders"]["interlace"]["status"] == "failed"


def test_a_budget_leaves_cases_out_by_name(tmp_path, capsys):
    out = tmp_path / "a.json"
    attention.main(["--preset", "smoke", "--budget", "-1", "--no-memory", "--out", str(out)])
    report = json.loads(out.read_text())
    assert not report["complete"] and len(report["left_out"]) == 4 and not report["cases"]
    show([str(out), str(tmp_path / "missing.json")])
    printed = capsys.readouterr().out
    assert "not run (--budget -1 s): packed_images 257" in printed and "missing: its phase wrote nothing" in printed


def test_masks_and_lengths_are_chosen():
    options = attention.parse(["--masks", "multimodal", "causal", "--lengths", "64", "128", "--preset", "smoke"])
    assert len(options.cases) == 14 and options.cases[0] == ("gemma3_images", 64)
    assert [case[1] for case in attention.parse(["--preset", "gpu"]).cases].index(65536) > 20
    assert attention.parse(["--preset", "cpu"]).cases[:2] == [("packed_images", 4096), ("causal", 4096)]


def test_the_clock_and_memory_of_cuda_on_stand_ins(monkeypatch):
    """Runs every line of the CUDA paths on a CPU: stub events with a clock, an allocator that counts."""
    ticks = iter(range(10**6))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks)

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return float(other.at - self.at)

    fakes = dict(
        Event=Event,
        _sleep=lambda cycles: None,
        synchronize=lambda device=None: None,
        memory_allocated=lambda: 1000,
        max_memory_allocated=lambda: 10**9,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("bench.measure.FLUSH_BYTES", 8)
    clock = Clock(CPU)
    clock.cuda, clock._flush = True, torch.empty(8, dtype=torch.int8)
    assert clock(lambda: "result") == ("result", 1.0) and clock.wall(lambda: None) >= 0
    p = problem()
    case = run_case(p, [PEERS["sdpa_dense"]], clock, Rounds(3, 1.0), {}, 1.0)
    results = 2 * p.q.nbytes + p.k.nbytes + p.v.nbytes
    assert case["contenders"]["sdpa_dense"]["extra_bytes"] == 10**9 - 1000 - results
    assert case["contenders"]["interlace"]["forward_ms"] == 1.0


def test_documents_for_flash_attention(monkeypatch):
    p = problem("document_causal", 100)
    ends, longest = PEERS["flash_attn"].build(p)
    assert ends.dtype == torch.int32 and ends[-1] == 100 and len(ends) == 9 and longest == 30
    seen = {}

    def varlen(q, k, v, *ends, **options):
        seen.update(options)
        return q, None

    def plain(q, k, v, **options):
        seen.update(options)
        return q

    module = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_func=plain)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)
    assert torch.equal(PEERS["flash_attn"].forward(p, (ends, longest)), p.q) and seen["max_seqlen_k"] == 30
    window = problem("sliding_window", 100)
    assert torch.equal(PEERS["flash_attn"].forward(window, None), window.q) and seen["window_size"] == (24, 0)


def test_memory_counts_what_a_step_allocates():
    def hungry(problem, state):
        waste = torch.ones(50_000_000)
        return PEERS["sdpa_dense"].forward(problem, state) + 0 * waste[0]

    dense = PEERS["sdpa_dense"]
    result = attention_memory.measure(dense._replace(forward=hungry), problem())
    if result["peak_was_reset"]:
        assert 190e6 < result["bytes"] < 300e6


def test_a_memory_figure_that_fails_says_so():
    result = attention_memory.in_a_fresh_process("interlace", "no such mask", 100, "2:1", 8, "float32", 1)
    assert "no such mask" in result["failed"]


def test_list_scheduling():
    assert subblocks.busy_times([5.0, 3.0, 2.0, 2.0], 2) == [7.0, 5.0]
    assert subblocks.busy_times([1.0], 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("cap", [1, 2, 1 << 30])
def test_work_items_hold_every_block_once(cap):
    plan = AttentionPlan.build(MASKS["gemma3_images"](1000), block=64, cap=cap)
    work = subblocks.items(plan)
    stats = plan.stats()
    assert len(work) == stats.work_items
    assert (sum(full for full, _ in work), sum(part for _, part in work)) == (stats.full, stats.partial)
    assert max(full + part for full, part in work) == stats.longest_item


def test_splitting_evens_out_the_modelled_busy_time():
    mask, costs = MASKS["causal"](4096), subblocks.Costs(0.01, 1.0, 1.5)
    whole, split = (
        subblocks.model(AttentionPlan.build(mask, cap=cap), 1, costs, 20) for cap in (1 << 30, 4)
    )  # 32 rows on 20 servers
    assert whole["busy_mean_ms"] < split["busy_mean_ms"] < whole["model_ms"]
    assert split["utilisation"] > 0.9 > whole["utilisation"] and split["spread"] < whole["spread"]


@pytest.mark.parametrize(("text", "heads"), [("64:8", (64, 8)), ("8", (8, 8))])
def test_heads(text, heads):
    assert parse_heads(text) == heads


@pytest.mark.parametrize("text", ["3:2", "0:1", "x"])
def test_heads_that_do_not_divide(text):
    with pytest.raises(ValueError):
        parse_heads(text)


def test_difference_is_relative_and_sees_nan():
    one = torch.ones(1, 2, 3, 4)
    assert attention_case._difference(1.5 * one, one) == pytest.approx(0.5)
    assert not attention_case._difference(one * torch.nan, one) <= 1e9
