"""A fourth modality, registered from outside: from files to a training step, with no change in the package."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig

from interlace.data import ChatDataset, load_chats
from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.data.chats.files.records import ChatFileError
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.page import Findings, write
from interlace.modalities import Modality, all_modalities, of_suffix, register, unregister
from interlace.modalities.errors import BrokenSampleError
from interlace.model import ModalityModule, MultimodalModel
from interlace.train.report.closing import Answer
from interlace.train.report.samples import pictures_of
from tests.data.chat_families import trained
from tests.data.chat_faults import TEMPLATE, said, talk, user
from tests.modalities.point_cloud import CloudSpec, PointCloud, PointEncoder

FEATURES = 6
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def cloud() -> Iterator[Modality]:
    made = register(PointCloud())
    yield made
    unregister(made.name)


def _save(folder: Path, name: str, points: int) -> str:
    generator = np.random.default_rng(points)
    np.save(folder / name, generator.standard_normal((points, FEATURES)))
    return name


def _model() -> MultimodalModel:
    torch.manual_seed(0)
    encoder = ModalityModule(PointEncoder(FEATURES, SiglipVisionConfig(**SIZES)), "mlp", downsample=2)
    language = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=410, num_key_value_heads=1))
    return MultimodalModel(encoders={"cloud": encoder}, language_model=language, placeholders={"cloud": 405})


def _format(model: MultimodalModel) -> TokenizerFormat:
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([*(f"<spare{number}>" for number in range(405 - len(tokenizer))), "<cloud>"], True)
    return TokenizerFormat(
        tokenizer,
        TEMPLATE,
        name="the template",
        tags={"cloud": "<cloud>"},
        specs={"cloud": CloudSpec(model.encoders["cloud"].default_shape[1])},
        tokens={"cloud": model.encoders["cloud"].tokens},
    )


def _chats(folder: Path, model: MultimodalModel) -> ChatDataset:
    names = [_save(folder, f"{points}.npy", points) for points in (12, 30, 100)]
    typed = [{"type": "cloud", "cloud": names[0]}, {"type": "text", "text": "what is it?"}]
    lines = [
        talk(user(typed), said("a chair")),
        talk(user("<cloud>and <cloud>"), said("two tables"), clouds=names[1:]),
        talk(user("only words"), said("yes")),
    ]
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "v.jsonl").write_text(lines[0] + "\n")
    files = [folder / "t.jsonl"], [folder / "v.jsonl"]
    return load_chats(*files, _format(model), Rules(), cache=folder / "cache")[0]


def test_prepared_chats_with_clouds_train_a_model(cloud: Modality, tmp_path: Path) -> None:
    model = _model()
    data = _chats(tmp_path, model)
    samples = [data.sample(index) for index in range(len(data))]
    assert [[item.shape for item in sample.media.get("cloud", [])] for sample in samples] == [
        [(12, FEATURES)], [(30, FEATURES), (64, FEATURES)], [],
    ]  # fmt: skip
    assert [data.lengths(index).get("cloud") for index in range(3)] == [[6], [15, 32], None]
    read = samples[0].media["cloud"][0].data
    assert read is not None and torch.equal(read, torch.from_numpy(np.load(tmp_path / "12.npy")).float())
    batch = model.collate(samples)
    assert [tuple(points.shape) for points in batch["cloud"]["points"]] == [(12, 6), (30, 6), (64, 6)]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        assert loss is not None
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        gradient = model.get_parameter("encoders.cloud.module.embed.weight").grad
        assert gradient is not None and float(gradient.abs().sum()) > 0
        optimizer.step()
    assert losses[1] < losses[0]


def test_clouds_in_a_tar_are_read_in_place(cloud: Modality, tmp_path: Path) -> None:
    model = _model()
    _save(tmp_path, "a.npy", 9)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(2):
            tar.add(tmp_path / "a.npy", f"{number}.npy")
            words = io.BytesIO(b"a lamp")
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = 6
            tar.addfile(entry, words)
    files = [tmp_path / "a.tar"]
    data, _ = load_chats(files, files, _format(model), Rules(), cache=tmp_path / "cache")
    text = data.format.decode(data.sample(0).input_ids.tolist(), skip_special=False)
    assert cloud.question in text and text.count("<cloud>") == 5


def test_pages_and_pictures_show_a_cloud(cloud: Modality, tmp_path: Path) -> None:
    model = _model()
    data = _chats(tmp_path, model)
    chat = data.store.chat(0)
    html = write("clouds", Findings(), [("t:1", chat, data.store.encoded(0))], data.format)
    assert "12.npy, 12 points" in html and "cloud x 6" in html
    answer = Answer(data.sample(0), "what?", "a chair", "a chair")
    ((label, image),) = pictures_of(answer, {"cloud": ("cloud", None)})
    assert label == "cloud" and image.shape == (16, 16, 3) and image.min() == 0


def test_broken_clouds_are_left_out_with_the_reason(cloud: Modality, tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(4))
    (tmp_path / "words.npy").write_text("no array")
    np.save(tmp_path / "wide.npy", np.zeros((4, 9)))
    names = ("flat.npy", "words.npy", "wide.npy", "gone.npy")
    lines = [talk(user([{"type": "cloud", "cloud": name}]), said("a")) for name in names]
    (tmp_path / "t.jsonl").write_text("\n".join([*lines, talk(user("b"), said("c"))]) + "\n")
    files = [tmp_path / "t.jsonl"]
    data, _ = load_chats(files, files, _format(_model()), Rules(), cache=tmp_path / "cache")
    kinds = {where.rpartition(":")[2]: kind for where, kind, _ in data.store.left_out}
    assert kinds == {"1": "broken file", "2": "broken file", "3": "size", "4": "missing file"}


def test_the_name_of_a_cloud_means_nothing_unregistered(tmp_path: Path) -> None:
    record = json.loads(talk(user([{"type": "cloud", "cloud": "a.npy"}]), said("a")))
    with pytest.raises(BrokenSampleError, match="'cloud'; known: text, image"):
        parse(record, tmp_path)
    with pytest.raises(ValueError, match="takes none of pixel_values"):
        ModalityModule(PointEncoder(FEATURES, SiglipVisionConfig(**SIZES)))
    assert of_suffix("a.npy") is None


def test_a_name_or_suffix_that_is_taken_is_refused(cloud: Modality) -> None:
    class Other(PointCloud):
        name = "scan"

    class Same(PointCloud):
        suffixes = (".ply",)

    with pytest.raises(ValueError, match=r"files \.npy belong to the modality 'cloud'"):
        register(Other())
    with pytest.raises(ValueError, match="the name 'cloud' is taken"):
        register(Same())
    assert register(PointCloud()) is cloud and [each.name for each in all_modalities()][3:] == ["cloud"]


def test_models_without_an_encoder_of_clouds_refuse_them(cloud: Modality, tmp_path: Path) -> None:
    _save(tmp_path, "a.npy", 5)
    (tmp_path / "t.jsonl").write_text(talk(user([{"type": "cloud", "cloud": "a.npy"}]), said("a")) + "\n")
    chats = _format(_model())
    chats.specs.clear()
    with pytest.raises(ChatFileError, match="kind cloud, the model no encoder for such"):
        load_chats([tmp_path / "t.jsonl"], [tmp_path / "t.jsonl"], chats, Rules(), cache=tmp_path / "cache")
