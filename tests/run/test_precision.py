"""bf16 is autocast over fp32 weights: dtypes of transfers and sums, and agreement of layouts to bf16's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlace.comm.channels.local import LocalChannel
from interlace.layout import Layout, ParallelSpec
from interlace.model import loss as losses
from interlace.run import parallelize
from tests.run.parity import oracle
from tests.tiny import random_microbatches, tiny_mllm

LLM = "language_model"
LAYOUTS: dict[str, dict[str, ParallelSpec]] = {
    "pp": {"vision": ParallelSpec(pp=2), LLM: ParallelSpec(pp=2)},
    "dp": {"vision": ParallelSpec(dp=2), LLM: ParallelSpec(dp=2)},
    "tp": {"vision": ParallelSpec(tp=2), LLM: ParallelSpec(tp=2)},
    "all": {"vision": ParallelSpec(tp=3), LLM: ParallelSpec(tp=2, pp=2, dp=2)},
}
SAME_CHUNKS = ("pp",)  # every operation has the same operands as on one rank


def step(specs: dict[str, ParallelSpec], autocast: torch.dtype | None, checkpointing: Any) -> tuple[float, dict]:
    mllm = tiny_mllm(hidden=24, heads=6, kv_heads=6, tied=True, encoders=("vision",)).train()
    batch = random_microbatches(mllm, "all")
    layout = Layout.from_specs(mllm, specs, placement="parallel")
    parallel = parallelize(mllm, layout, autocast=autocast, checkpointing=checkpointing, timeout=30)
    result = parallel.step([sample for group in batch for sample in group], microbatches=2)
    return result.loss, {name: p.grad for name, p in mllm.named_parameters()}


@pytest.mark.parametrize(
    ("name", "chunked"),
    [
        ("pp", False),
        ("tp", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("pp", True), ("dp", False), ("tp", False), ("all", True))
        ),
    ],
)
def test_layouts_agree_to_the_rounding_of_bf16(name: str, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 64)
    one = {"vision": ParallelSpec(), LLM: ParallelSpec()}
    exact, _ = step(one, None, "none")
    loss, gradients = step(one, torch.bfloat16, "none")
    sent: dict[tuple[str, int, bool], set[torch.dtype]] = {}
    summed: set[torch.dtype] = set()
    send, reduce = LocalChannel.send, LocalChannel.start_all_reduce

    def note_send(self: Any, tensor: torch.Tensor, peer: int, tag: Any, *rest: Any) -> Any:
        sent.setdefault((tag.module, tag.stage, tag.grad), set()).add(tensor.dtype)
        return send(self, tensor, peer, tag, *rest)

    def note_sum(self: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        summed.add(tensor.dtype)
        return reduce(self, tensor, *rest)

    monkeypatch.setattr(LocalChannel, "send", note_send)
    monkeypatch.setattr(LocalChannel, "start_all_reduce", note_sum)
    result, other = step(LAYOUTS[name], torch.bfloat16, "selective" if chunked else "full")
    assert loss != exact and loss == pytest.approx(exact, rel=2e-2)
    close = 1e-6 if name in SAME_CHUNKS else 1e-2
    assert result == pytest.approx(loss, rel=close)
    for key, expected in gradients.items():
        if expected is None:
            assert other[key] is None, key
            continue
        assert expected.dtype is other[key].dtype is torch.float32, key
        if expected.norm() > 1e-3:
            error = (other[key] - expected).norm() / expected.norm()
            assert error <= (1e-5 if name in SAME_CHUNKS else 5e-2), (key, error)
    assert summed == {torch.float32} or (name == "tp" and not summed)
    for (module, stage, _), dtypes in sent.items():
        last_of_encoder = module == "vision" and stage == LAYOUTS[name]["vision"].pp - 1
        assert dtypes == {torch.bfloat16 if last_of_encoder else torch.float32}, (module, stage)


def test_reused_weights_accumulate_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast cached for reuse would accumulate their gradients in bf16."""
    one = {"vision": ParallelSpec(), LLM: ParallelSpec()}
    loss, gradients = step(one, torch.bfloat16, "none")
    call = torch.nn.Module.__call__

    def forgetting(*args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()
        return call(*args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", forgetting)
    result, other = step(one, torch.bfloat16, "none")
    assert result == loss
    for name, expected in gradients.items():
        assert expected is None or torch.equal(other[name], expected), name


def test_bf16_is_near_one_process_in_fp32() -> None:
    mllm = tiny_mllm(hidden=24, heads=6, kv_heads=6, tied=True, encoders=("vision",)).train()
    loss, _ = oracle(mllm, random_microbatches(mllm, "all"))
    result, _ = step(LAYOUTS["all"], torch.bfloat16, "none")
    assert result != loss and result == pytest.approx(loss, rel=2e-2)
