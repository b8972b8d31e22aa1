"""Exported folders of modules give the same results outside of Interlace: encoders, projectors and generation."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from interlace.data.chats.files.shapes import parse
from interlace.modalities.files import Member
from interlace.model import IGNORE, Media, ModalityModule, MultimodalModel, Sample, generate
from interlace.model.collate import JOINED
from interlace.train.commands.reloaded import Checked, Prompt, Reloaded, ReloadedWhole
from tests.train import whole_families

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION, AUDIO, END = 60, 61, 1


def model_of(bidirectional: bool | str) -> MultimodalModel:
    """Two vision encoders, one with class tokens, and an audio encoder; sharp weights, so that answers differ."""
    torch.manual_seed(0)
    whisper = WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=20,
    )  # fmt: skip
    llama = LlamaConfig(**SMALL, vocab_size=64, num_key_value_heads=1, max_position_embeddings=128)
    model = MultimodalModel(
        encoders={
            "vision": ModalityModule(
                SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=16, patch_size=4)), "mlp", downsample=3
            ),
            "shuffled": ModalityModule(
                CLIPVisionModel(CLIPVisionConfig(**SMALL, image_size=16, patch_size=4)), "pixel_shuffle"
            ),
            "audio": ModalityModule(WhisperEncoder(whisper), "linear", downsample=2),
        },
        language_model=LlamaForCausalLM(llama),
        placeholders={"vision": VISION, "shuffled": 62, "audio": AUDIO},
        bidirectional=bidirectional,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    return model.eval()


@pytest.fixture(scope="module", params=[True, False], ids=["both ways", "causal"])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[MultimodalModel, Reloaded]:
    folder = tmp_path_factory.mktemp("exported") / "out"
    model = model_of(request.param)
    model.save_pretrained(folder)
    return model, Reloaded(folder)


def prompt(model: MultimodalModel, shapes: list[tuple[str, tuple[int, ...]]], seed: int) -> Sample:
    """Text between media of these shapes."""
    made = torch.Generator().manual_seed(seed)
    ids, media = [5], dict[str, list[Media]]()
    for name, shape in shapes:
        count = model.encoders[name].tokens(shape)
        media.setdefault(name, []).append(Media(shape, count, torch.randn(shape, generator=made)))
        ids += [model.placeholders[name]] * count + torch.randint(2, 60, (2,), generator=made).tolist()
    tokens = torch.tensor([*ids, 7])
    return Sample(tokens, torch.full_like(tokens, IGNORE), media)


sides = st.integers(1, 5).map(lambda n: 4 * n)
SHAPES = st.one_of(
    st.tuples(st.just("vision"), st.tuples(st.just(3), sides, sides)),
    st.tuples(st.just("shuffled"), st.tuples(st.just(3), sides.map(lambda n: 2 * n), sides.map(lambda n: 2 * n))),
    st.tuples(st.just("audio"), st.tuples(st.just(8), st.integers(2, 40))),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(SHAPES, max_size=4), seed=st.integers(0, 999))
def test_the_same_answers_to_media_of_any_size(both: Any, shapes: list[Any], seed: int) -> None:
    model, reloaded = both
    asked = prompt(model, shapes, seed)
    [own] = generate(model, [asked], max_new_tokens=6, stop=(END,))
    theirs = reloaded.answer(Prompt(asked), end=END, max_new_tokens=6)
    assert theirs == own or reloaded.tied(Prompt(asked), own, theirs, END)
    if shapes:
        name, items = next(iter(asked.media.items()))
        features = model.encoders[name](**model.encoders[name].collate(items))
        assert torch.allclose(torch.cat([reloaded.features(name, item.data) for item in items]), features, atol=1e-5)


@pytest.mark.parametrize("way", [True, False, JOINED])
def test_who_sees_whom_comes_back(way: bool | str, tmp_path: Path) -> None:
    model = model_of(way)
    model.save_pretrained(tmp_path / "out")
    again = MultimodalModel.from_pretrained(tmp_path / "out")
    assert again.language_settings.bidirectional is way or again.language_settings.bidirectional == way == JOINED
    reloaded = Reloaded(tmp_path / "out")
    shape = (3, 8, 8)
    count = model.encoders["vision"].tokens(shape)
    items = [Media(shape, count, torch.randn(shape)) for _ in range(2)]
    ids = torch.tensor([5, *[VISION] * 2 * count, 7])
    sees = reloaded._inputs(ids, {"vision": [item.data for item in items]})[1][0, 0] == 0
    batch = model.collate_module("language_model", [Sample(ids, torch.full_like(ids, IGNORE), {"vision": items})])
    assert torch.equal(sees, batch["mask"].to_dense()[0])
    facts = tmp_path / "out/interlace.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"bidirectional": "joint"}))
    for read in (MultimodalModel.from_pretrained, Reloaded):
        with pytest.raises(ValueError, match="bidirectional is 'joint': it must be True, False or 'joined'"):
            read(tmp_path / "out")
    with pytest.raises(ValueError, match="bidirectional is 'Joined'"):
        model_of("Joined")


def test_another_answer_is_no_tie(both: Any) -> None:
    model, reloaded = both
    asked = prompt(model, [], 0)
    [own] = generate(model, [asked], max_new_tokens=4, stop=(END,))
    other = [(own[0] + 1) % 60, *own[1:]]
    assert not reloaded.tied(Prompt(asked), own, other, END) and not reloaded.tied(Prompt(asked), own, own, END)
    assert Checked(3, 2, 1).good and not Checked(3, 2, 0).good
    assert "3 held-out questions" in (words := Checked(3, 2, 1).words(Path("out"))) and "1 up to a tie" in words


def test_what_it_does_not_know_how_to_ask_is_refused(both: Any, tmp_path: Path) -> None:
    model, reloaded = both
    with pytest.raises(ValueError, match="SiglipVisionModel takes other inputs than mel frames"):
        reloaded.features("vision", torch.zeros(8, 4))
    with pytest.raises(ValueError, match="WhisperEncoder takes other inputs than one picture"):
        reloaded.features("audio", torch.zeros(3, 8, 8))
    model.save_pretrained(tmp_path / "out")
    config = tmp_path / "out/language_model/config.json"
    output = json.loads(config.read_text()) | {"sliding_window": 4}
    config.write_text(json.dumps(output))
    if reloaded.bidirectional:
        with pytest.raises(ValueError, match="sliding windows"):
            Reloaded(tmp_path / "out")


def test_a_whole_checkpoint_is_asked_about_members_of_tars(tmp_path: Path) -> None:
    _, records, table = whole_families.prepare("llava", tmp_path, count=1)
    chat = parse(records[0], tmp_path).prompt()
    shard = tmp_path / "a.tar"
    turns = []
    with tarfile.open(shard, "w") as tar:
        for turn in chat.turns:
            parts = []
            for part in turn.parts:
                if part.kind == "image":
                    tar.add(part.path, Path(part.path).name)
                    size = Path(part.path).stat().st_size
                    member = Member(str(shard), tar.offset - -(-size // 512) * 512, size, Path(part.path).name)
                    part = replace(part, path=str(member))
                parts.append(part)
            turns.append(replace(turn, parts=tuple(parts)))
    asked = ReloadedWhole(Path(table["model"]["path"]))
    wanted, result = (asked._inputs(Prompt(None, each)) for each in (chat, replace(chat, turns=tuple(turns))))
    assert "pixel_values" in result and all(torch.equal(result[key], value) for key, value in wanted.items())
