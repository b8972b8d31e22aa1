"""Processors of whole checkpoints: token by token and pixel by pixel equal to HuggingFace's own call for a chat."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.data import IGNORE, Media
from interlace.data.chats.dataset import ChatDataset, load_chats
from interlace.data.chats.encoding import load as chats_load
from interlace.data.chats.encoding.processor import ProcessorFormat
from interlace.data.chats.examine import examine
from interlace.data.chats.files.sources import Rules
from tests.data import chat_families


def _write(path: Path, records: list[Any]) -> Path:
    import json

    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _dataset(family: Any, file: Path, cache: Path, **rules: Any) -> ChatDataset:
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders)
    return load_chats([file], [file.with_name("validation.jsonl")], made, Rules(**rules), cache=cache)[0]


def _expected(family: Any, record: Any, *, prompt: bool = False) -> Any:
    """HuggingFace's own result for the record. prompt: for the turns before its first answer."""
    messages = copy.deepcopy(record["messages"])
    if prompt:
        messages = messages[: [message["role"] for message in messages].index("assistant")]
    return family.processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=not prompt and "generation %}" in family.processor.chat_template,
    )


def _pixels(out: Any) -> torch.Tensor:
    values = out["pixel_values"]
    if "image_grid_thw" in out or values.dim() == 4:
        return values
    if "image_sizes" in out:  # tiles padded to the image with the most tiles
        return torch.cat([tiles[(tiles.flatten(1) != 0).any(1)] for tiles in values])
    return values.flatten(0, 1)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "idefics3", "internvl"])
def test_inputs_are_those_of_huggingface(name: str, tmp_path: Path, count: int = 10) -> None:
    compare(name, tmp_path, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*chat_families.FAMILIES, "smolvlm"])
def test_inputs_are_those_of_huggingface_in_200_chats(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 200)


def compare(name: str, folder: Path, count: int) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    family = getattr(chat_families, name)(folder / "model")
    rng = random.Random(name)
    paths = chat_families.pictures(folder / "pictures", 24)
    records = [chat_families.chat(rng, paths) for _ in range(count)]
    _write(folder / "validation.jsonl", records[:1])
    dataset = _dataset(family, _write(folder / "train.jsonl", records), folder / "cache")
    assert len(dataset) == count and not dataset.failures
    sent = pickle.loads(pickle.dumps(dataset))  # as in a worker process
    for index in range(min(count, 4)):
        pairs = zip(
            sent.sample(index).media.get("vision", []), dataset.sample(index).media.get("vision", []), strict=True
        )
        assert all(torch.equal(theirs.data, ours.data) for theirs, ours in pairs)
    pictures = 0
    for index, record in enumerate(records):
        sample, out = dataset.sample(index), _expected(family, record)
        ids = out["input_ids"][0]
        assert sample.input_ids.tolist() == ids.tolist()
        items = sample.media.get("vision", [])
        assert sum(item.tokens for item in items) == int((ids == family.placeholder).sum())
        if "assistant_masks" in out:
            mask = torch.as_tensor(out["assistant_masks"][0]).bool()
            assert torch.equal(sample.labels[:-1] != IGNORE, mask[1:])
        learnt = sample.labels[:-1] != IGNORE
        assert torch.equal(sample.labels[:-1][learnt], ids[1:][learnt])
        pictures += len(items)
        _compare_media(items, out)
        prompt, asked = dataset.prompt(index)[0], _expected(family, record, prompt=True)
        assert prompt.input_ids.tolist() == asked["input_ids"][0].tolist()
        assert not (prompt.labels != IGNORE).any()
        _compare_media(prompt.media.get("vision", []), asked)
    assert pictures > count / 2


def _compare_media(items: list[Media], out: Any) -> None:
    if not items:
        assert "pixel_values" not in out
        return
    result = [item.data if len(item.shape) in (2, 4) else item.data[None] for item in items]
    assert torch.equal(torch.cat(result), _pixels(out))
    for key, told in (("image_grid_thw", "grid_thw"), ("image_sizes", "image_sizes")):
        if key in out:
            assert [list(item.about[told]) for item in items] == out[key].tolist()


def _examined(family: Any, folder: Path, text: str, *, picture: str = "") -> Any:
    content = [{"type": "text", "text": text}, *([{"type": "image", "image": picture}] if picture else [])]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    made = ProcessorFormat(family.processor, name="template", placeholders={"vision": family.placeholder})
    [one] = examine([_write(folder / "a.jsonl", [{"messages": messages}])], made, Rules(), folder)
    return one


@pytest.mark.parametrize("token", ["<image_soft_token>", "<start_of_image>"])
def test_a_placeholder_written_as_words_is_named_as_such(token: str, tmp_path: Path) -> None:
    family = chat_families.FAMILIES["gemma3"](tmp_path / "model")
    [picture, *_] = chat_families.pictures(tmp_path / "pictures", 1)
    for file in ("", str(picture)):
        one = _examined(family, tmp_path, f"what is {token} here?", picture=file)
        assert one.broken is not None and one.broken.kind == "placeholder", one.broken
    assert _examined(family, tmp_path, "what is here?", picture=str(picture)).broken is None


def test_drawings_cost_their_record_alone(tmp_path: Path) -> None:
    family = chat_families.FAMILIES["gemma3"](tmp_path / "model")
    (tmp_path / "a.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="24.5" height="24"><rect width="24" height="24"/></svg>'
    )
    one = _examined(family, tmp_path, "what?", picture=str(tmp_path / "a.svg"))
    assert one.broken is not None and one.broken.kind == "no encoder" and "save it as a PNG" in str(one.broken)


def test_what_smolvlm_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"no processor can be loaded: .*pip install num2words"):
        chat_families.smolvlm(tmp_path / "model")


def test_templates_with_the_date_of_today_are_refused(tmp_path: Path) -> None:
    family = chat_families.FAMILIES["gemma3"](tmp_path / "model")
    dated = "{{ strftime_now('%d %b %Y') }}" + family.processor.chat_template
    with pytest.raises(ValueError, match="today's date"):
        ProcessorFormat(family.processor, dated, name="template", placeholders={"vision": family.placeholder})


@pytest.mark.parametrize(
    ("name", "why"), [("PaliGemmaProcessor", "a prefix and a suffix"), ("VoxtralProcessor", "mistral-common")]
)
def test_processors_that_no_template_fits_are_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(f'{{"processor_class": "{name}"}}')
    with pytest.raises(ValueError, match=f"{name} .*{why}.* no template makes it train on chats"):
        chats_load.load_processor(tmp_path)
