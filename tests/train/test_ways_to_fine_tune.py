"""One checkpoint, own chats, three ways to fine-tune it by commands: trained weights change, frozen ones keep their
bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from interlace.cli import main
from interlace.train.report.metrics import LOSS, read_metrics
from tests.train.faults import Place, as_a_command

pytestmark = pytest.mark.slow
WAYS = {
    "full": ("", "lr = 1e-2"),
    "projector": ("", 'lr = 3e-2\nfreeze = ["*"]\ntrain = ["*.projector"]'),
    "lora": ("[train.lora]\nrank = 8\nalpha = 16\n", "lr = 3e-2"),
}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with as_a_command():
        made = Place(tmp_path_factory.mktemp("user"))

    def shaken(found: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)  # fresh ones are so small that little can be learnt beside them
        for tensor in found.values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)

    made.tensors("whole/model.safetensors", shaken)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_it_learns_and_what_is_frozen_stays(way: str, user: Place) -> None:
    section, train = WAYS[way]
    text = (user.at / "whole.toml").read_text().replace('name = "whole"', f'name = "{way}"')
    text = text.replace("steps = 2\nbatch_size = 2", f"steps = 12\nbatch_size = 4\n{train}\nweight_decay = 0.0")
    text = text.replace("[parallel]", f"{section}\n[parallel]").replace("[log]", "[log]\nevery = 1")
    (user.at / f"{way}.toml").write_text(text)
    out = user.at / f"{way}-out"
    with as_a_command():
        assert main(["train", str(user.at / f"{way}.toml")]) == 0
        [run] = (user.at / "runs" / way).glob("2*")
        assert main(["export", str(run), str(out)]) == 0
    losses = [line[LOSS] for line in read_metrics(run) if LOSS in line]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3]) - 0.1, losses
    before, after = (load_file(folder / "model.safetensors") for folder in (user.at / "whole", out))
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    projector = {key for key in before if "multi_modal_projector" in key}
    linear = {key for key in before if "language_model" in key and key.endswith("_proj.weight")}
    assert moved >= {"full": projector | linear, "projector": projector, "lora": projector | linear}[way]
    if way != "full":
        assert moved <= {"projector": projector, "lora": projector | linear}[way]
    if way == "lora":
        _adapter(user, run, out)


def _adapter(user: Place, run: Path, merged: Path) -> None:
    """peft loads it onto the first checkpoint; the result equals HuggingFace's class for the merged one."""
    import peft

    with as_a_command():
        assert main(["export", str(run), str(user.at / "adapter"), "--adapter"]) == 0
    plain = LlavaForConditionalGeneration.from_pretrained(user.at / "whole").eval()
    other = LlavaForConditionalGeneration.from_pretrained(merged).eval()
    record = json.loads((user.at / "train.jsonl").read_text().splitlines()[0])
    asked: list[Any] = [{"type": "image", "image": str(user.at / record["image"])}, {"type": "text", "text": "What?"}]
    inputs = AutoProcessor.from_pretrained(merged).apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        first, expected = plain(**inputs).logits, other(**inputs).logits
        loaded = peft.PeftModel.from_pretrained(plain, user.at / "adapter").eval()
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    assert (first - expected).abs().max() > 0.01
