"""Whole checkpoints on own chats: the loss equals that of HuggingFace's own model with its own processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interlace.model import MultimodalModel
from interlace.model.whole.model import whole_class
from interlace.train.commands.reloaded import ask, check
from interlace.train.config.load import from_table
from interlace.train.data.feed import datasets
from interlace.train.data.texts import tokenizer_of
from tests.data import chat_families
from tests.train.whole_families import MODELS, SEEING, huggingface_loss, kind_of, prepare


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, kind_of(name), marks=() if name == "qwen2_vl" else pytest.mark.slow) for name in MODELS),
        *(pytest.param(name, "video", marks=[pytest.mark.slow, chat_families.needs_torchvision]) for name in SEEING),
    ],
)
def test_the_loss_is_huggingfaces(name: str, kind: str, tmp_path: Path) -> None:
    family, records, table = prepare(name, tmp_path, kind)
    config = from_table(table)
    mllm = MultimodalModel.from_pretrained(tmp_path / "model").eval()
    train, _ = datasets(config, mllm, tokenizer_of(config))
    assert len(train) == len(records), train.report()
    samples = [train.sample(i) for i in range(len(records))]
    assert any(sample.media for sample in samples)
    expected_model = whole_class(tmp_path / "model")[0].from_pretrained(tmp_path / "model", attn_implementation="eager")
    with torch.no_grad():
        loss = mllm(**mllm.collate(samples)).loss
        expected = huggingface_loss(expected_model.eval(), family, records, samples)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "qwen2_audio"])
def test_a_folder_that_asks_otherwise_is_noticed(name: str, tmp_path: Path) -> None:
    config = from_table(prepare(name, tmp_path, kind_of(name))[2])
    asked = ask(MultimodalModel.from_pretrained(tmp_path / "model").eval(), config, 2, "config")
    assert check(asked, tmp_path / "model").good
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% if add_generation_prompt %}", "{% if false %}"))
    checked = check(asked, tmp_path / "model")
    assert checked.other_prompts == 2 and not checked.good
