"""FLOPs of whole checkpoints, against torch's count for HuggingFace's own class with eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.estimate.step_flops import StepFlops, Uncountable
from interlace.model import IGNORE, MultimodalModel
from interlace.model.counting.pairs import Document, visible
from tests.model.wholes import CASES, own_logits, samples, written
from tests.run.flops import counted, total


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "qwen2_audio"])  # attends to padding
def test_a_whole_checkpoint(name: str, tmp_path: Path) -> None:
    whole = written(name, tmp_path / "whole")
    whole.set_attn_implementation("eager")
    mllm = MultimodalModel.from_pretrained(tmp_path / "whole")
    if name == "qwen3_vl":  # so small that its mergers dominate, and count as its layers
        with pytest.raises(Uncountable, match="used outside the layers"):
            StepFlops(mllm)
        return
    count = StepFlops(mllm)
    for number, sample in enumerate(samples(name, mllm)):
        wanted, length = counted(lambda n=number, s=sample: own_logits(name, whole, n, s)), len(sample)
        # Eager attention computes the whole square of scores, and HuggingFace the logits of all positions.
        mask = mllm.collate_module("language_model", [sample])["mask"]
        work = count._fed if sample.media else count._plain
        for kind in work.attention:
            seen = visible(Document(length, True, count._spans(sample)), kind.limits)
            if not kind.limits.narrow:
                seen = int(mask.to_dense().sum())
            wanted -= kind.model(length * length) - kind.model(seen)
        wanted -= work.target.model * int((sample.labels == IGNORE).sum())
        assert total(count.of([sample])).model == wanted, (name, number)
