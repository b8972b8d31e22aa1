"""Whole checkpoints: split into modules they equal HuggingFace's own class; saved again they have the same keys."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, ModalityModule, MultimodalModel, Sample
from interlace.model.collate import JOINED
from interlace.model.whole.model import copy_companions, dtype_of, read_whole
from interlace.run import parallelize
from tests.model import wholes, zoo

FAST = ("gemma3", "qwen3_vl")  # bidirectional, and causal
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in wholes.CASES]


class Family(NamedTuple):
    """whole: HuggingFace's class with the gradients of the loss over `batch`."""

    name: str
    folder: Path
    whole: nn.Module
    model: MultimodalModel
    batch: list[Sample]
    loss: float

    def mllm(self) -> MultimodalModel:
        """A copy of the result of `from_pretrained`, for the test's own use."""
        return copy.deepcopy(self.model)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return read(request.param, tmp_path_factory.mktemp(request.param))


def read(name: str, folder: Path) -> Family:
    kind = type(wholes.written(name, folder))
    (folder / "tokenizer.json").write_text("{}")
    mllm = MultimodalModel.from_pretrained(folder, backend="reference").eval()
    whole = kind.from_pretrained(folder, attn_implementation="eager").eval()
    batch = wholes.samples(name, mllm)
    loss = wholes.own_loss(name, whole, batch)
    loss.backward()
    return Family(name, folder, whole, mllm, batch, float(loss.detach()))


def compare(mllm: MultimodalModel, whole: nn.Module) -> None:
    expected = {name: p.grad for name, p in whole.named_parameters()}
    result = {mllm.name_in_whole(name): p.grad for name, p in mllm.named_parameters()}
    assert result.keys() == expected.keys()
    unused = {name for name, want in expected.items() if want is None or not want.any()}
    assert len(unused) < len(expected) / 3
    assert all(result[name] is None or not result[name].any() for name in unused)
    zoo.assert_same_gradients(result, {name: want for name, want in expected.items() if name not in unused})


def test_same_as_huggingface(family: Family) -> None:
    mllm = family.mllm()
    assert mllm.language_settings.bidirectional == (JOINED if family.name == "gemma3" else False)
    output = mllm(**mllm.collate(family.batch))
    assert float(output.loss.detach()) == pytest.approx(family.loss, rel=1e-5)
    pieces = output.logits[0].split([len(sample) for sample in family.batch])
    with torch.no_grad():
        for number, (sample, piece) in enumerate(zip(family.batch, pieces, strict=True)):
            wanted = wholes.own_logits(family.name, family.whole, number, sample)
            torch.testing.assert_close(piece, wanted, rtol=1e-5, atol=1e-5)
    output.loss.backward()
    compare(mllm, family.whole)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_keeps_the_gradients(family: Family, mode: str) -> None:
    mllm = family.mllm()
    mllm.set_checkpointing(mode)
    mllm(**mllm.collate(family.batch)).loss.backward()
    compare(mllm, family.whole)


def test_saved_again_it_is_the_same_file(family: Family, tmp_path: Path) -> None:
    mllm = family.mllm()
    mllm.save_pretrained(tmp_path / "again")
    before, after = (load_file(at / "model.safetensors") for at in (family.folder, tmp_path / "again"))
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "again" / "tokenizer.json").exists()
    assert (tmp_path / "again" / "config.json").read_text() == (family.folder / "config.json").read_text()
    again = type(family.whole).from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = wholes.own_logits(family.name, family.whole, 2, family.batch[2])
        assert torch.equal(wholes.own_logits(family.name, again, 2, family.batch[2]), wanted)
    with pytest.raises(ValueError, match="exists and is not empty"):
        mllm.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("stages", [1, 2])
def test_cut_over_ranks(family: Family, stages: int) -> None:
    mllm = family.mllm()
    [encoder, language_model] = mllm.modules_order()
    layout = Layout.from_specs(mllm, {encoder: ParallelSpec(), language_model: ParallelSpec(pp=stages)})
    parallel = parallelize(mllm, layout, schedule="1f1b", transport="local")
    result = parallel.step(family.batch, microbatches=2)
    assert result.loss == pytest.approx(family.loss, rel=1e-5)
    compare(mllm, family.whole)


def test_frozen_parts(family: Family) -> None:
    mllm = family.mllm()
    [encoder, language_model] = mllm.modules_order()
    mllm.freeze(encoder)
    mllm.freeze(language_model)
    parts = mllm.encoders[encoder].parts
    after = [*(f"{parts.base}.{each}" for each in parts.beside), *(f"model.visual.{each}" for each in parts.mergers)]
    trained = {mllm.name_in_whole(name) for name, p in mllm.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith(tuple(after)) for name in trained)
    mllm(**mllm.collate(family.batch)).loss.backward()
    assert {mllm.name_in_whole(name) for name, p in mllm.named_parameters() if p.grad is not None} <= trained
    mllm.freeze(f"{encoder}.projector")
    assert not any(p.requires_grad for p in mllm.parameters())
    mllm.unfreeze(f"{encoder}.projector")
    mllm.unfreeze(encoder)
    assert {mllm.name_in_whole(name).split(".")[1] for name, p in mllm.named_parameters() if p.requires_grad} == {
        parts.tower,
        *parts.beside,
    }


def test_answers_are_huggingfaces(family: Family) -> None:
    """Token by token, packed and with a cache, against recomputation of the whole text for each token."""
    mllm, whole = family.mllm(), family.whole
    result = [mllm.generate(sample, max_new_tokens=4) for sample in family.batch[1:]]
    never = [wholes.TOKEN, *([wholes.VIDEO] if len(mllm.placeholders) and "qwen" in family.name else [])]
    for number, (sample, answer) in enumerate(zip(family.batch[1:], result, strict=True), start=1):
        ids = sample.input_ids
        for token in answer:
            longer = Sample(ids, torch.full_like(ids, -100), sample.media)
            with torch.no_grad():
                logits = wholes.own_logits(family.name, whole, number, longer)[-1]
            logits[never] = -torch.inf
            best = logits.topk(2)
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 1e-4
            ids = torch.cat([ids, torch.tensor([token])])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return read("qwen3_vl", tmp_path_factory.mktemp("qwen"))


def test_positions_and_features_of_inner_layers_are_dealt(qwen: Family) -> None:
    mllm = qwen.mllm()
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(), "language_model": ParallelSpec(cp=2)})
    parallel = parallelize(mllm, layout, schedule="1f1b", transport="local")
    assert parallel.step(qwen.batch, microbatches=2).loss == pytest.approx(qwen.loss, rel=1e-5)
    compare(mllm, qwen.whole)


def test_what_qwen_does_not_take_is_refused(qwen: Family) -> None:
    mllm = qwen.model
    with pytest.raises(ValueError, match=r"cannot be cut before layer 1: .*DeepStack.* Cut it before layer 2 or later"):
        mllm.slice("language_model", 0, 1)
    grid = {"grid_thw": (1, 4, 4)}
    item = Media((16, 24), 4, torch.zeros(16, 24), about=grid)
    ids = torch.tensor([5, *[wholes.TOKEN] * 8, 7])
    touching = Sample(ids, torch.full_like(ids, -100), {"vision": [item, item]}, "touching")
    with pytest.raises(ValueError, match="'touching', vision item 1 directly follows another item"):
        mllm.collate([touching])
    untold = Sample(ids[:6], torch.full((6,), -100), {"vision": [Media((16, 24), 4, torch.zeros(16, 24))]}, "untold")
    with pytest.raises(ValueError, match=r"'untold'.*grid_thw"):
        mllm.collate([untold])
    batch = mllm.collate(qwen.batch)
    del batch["position_ids"]
    with pytest.raises(ValueError, match="several positions each"):
        mllm(**batch)


def test_unsupported_video_features_are_refused(tmp_path: Path) -> None:
    wholes.written("llava_onevision", tmp_path / "onevision")
    mllm = MultimodalModel.from_pretrained(tmp_path / "onevision", backend="reference")
    assert mllm.placeholders == {"vision": wholes.TOKEN}
    shape, about = (3, 3, 16, 16), {"image_sizes": (16, 30)}
    count = mllm.encoders["vision"].tokens(shape, about)
    ids = torch.tensor([5, *[wholes.VIDEO] * count, 7])
    media = Media(shape, count, torch.zeros(shape), about=about)
    with pytest.raises(ValueError, match=r"'video'.*vision"):
        mllm.collate([Sample(ids, torch.full_like(ids, -100), {"vision": [media]}, "video")])
    with pytest.raises(ValueError, match=r"VideoLlava.* has a second tower, '(video|image)_tower'"):
        MultimodalModel.of_whole(wholes.video_llava())


def test_seconds_of_videos_place_them(tmp_path: Path) -> None:
    """tokens_per_second is 4: at 0.5 s per frame the second frame is 2 positions later, and so is the text after it."""
    wholes.written("qwen2_5_vl", tmp_path)
    mllm = MultimodalModel.from_pretrained(tmp_path, backend="reference").eval()
    positions = mllm.language_settings.positions
    video = Media((32, 24), 8, torch.zeros(32, 24), about={"grid_thw": (2, 4, 4), "second_per_grid_ts": (0.5,)})
    ids = torch.tensor([5, *[wholes.VIDEO] * 8, 7])
    sample = Sample(ids, torch.full_like(ids, -100), {"vision": [video]}, "told")
    assert positions is not None and positions(sample)[:, 0].tolist() == [0, 1, 1, 1, 1, 3, 3, 3, 3, 4]
    for about in ({}, {"second_per_grid_ts": ()}, {"second_per_grid_ts": (0.0,)}):
        untold = Media((32, 24), 8, torch.zeros(32, 24), about={"grid_thw": (2, 4, 4), **about})
        with pytest.raises(ValueError, match=r"'untold', vision item 0 is a video and .*second_per_grid_ts"):
            mllm.collate([Sample(ids, torch.full_like(ids, -100), {"vision": [untold]}, "untold")])


def damaged(qwen: Family, tmp_path: Path, weights: dict[str, torch.Tensor] | None, **config: object) -> Path:
    folder = tmp_path / "damaged"
    folder.mkdir()
    table = json.loads((qwen.folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(table))
    if weights is not None:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_folders_that_are_not_whole_are_refused(qwen: Family, tmp_path: Path) -> None:
    weights = load_file(qwen.folder / "model.safetensors")
    first, *others = weights
    text = json.loads((qwen.folder / "config.json").read_text())["text_config"]
    cases = [
        (None, {}, "no file named"),
        ({key: weights[key] for key in others}, {}, "has no weight"),
        (weights | {"model.more": torch.ones(1)}, {}, "has a weight that the model does not"),
        (weights | {first: torch.ones(3)}, {}, "of another shape|size mismatch|mismatch"),
        (weights, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "not a vision- or audio-language"),
        (weights, {"model_type": "qwen9"}, "qwen9"),
        (weights, {"architectures": [None]}, "architectures"),
        (weights, {"architectures": "Qwen3VLForConditionalGeneration"}, "architectures"),
        (weights, {"text_config": text | {"hidden_act": "no such"}}, "cannot be read: KeyError: 'no such'"),
    ]
    for number, (given, config, message) in enumerate(cases):
        where = tmp_path / str(number)
        where.mkdir()
        with pytest.raises(ValueError, match=message):
            MultimodalModel.from_pretrained(damaged(qwen, where, given, **config))
    with pytest.raises(ValueError, match=r"has no config.json"):
        MultimodalModel.from_pretrained(tmp_path)
    cut = damaged(qwen, tmp_path, weights)
    for content in ((cut / "model.safetensors").read_bytes()[:-40], b"not a file of weights", b""):
        (cut / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged cannot be read: ") as caught:
            MultimodalModel.from_pretrained(cut)
        assert len(str(caught.value).splitlines()) == 1


def test_models_of_modules_are_folders(tmp_path: Path) -> None:
    mllm = zoo.build()
    mllm.save_pretrained(tmp_path / "out")
    again = MultimodalModel.from_pretrained(tmp_path / "out", backend="reference")
    before, after = mllm.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    batch = zoo.samples(mllm)
    assert torch.equal(mllm(**mllm.collate(batch)).loss, again(**again.collate(batch)).loss)
    with pytest.raises(ValueError, match="built from modules"):
        mllm.whole()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": {"language_model": {"class": "os.path"}}}, "os.path is not a model class of transformers"),
        ({"modules": {"language_model": {"class": "transformers.no.such.Model"}}}, "No module named"),
        ({"modules": {"language_model": {"class": 3}}}, "class is 3"),
        ({"modules": {"language_model": {}}}, "it has no 'class'"),
        ({"modules": []}, "names no language_model"),
        ({"modules": [1]}, "interlace.json is invalid: "),
        ({"placeholders": {"vision": "46"}}, "a placeholder is '46'"),
        ({"bidirectional": "no"}, "bidirectional is 'no'"),
        ({"format": 2, "modules": None}, "has format 2, but this version of Interlace reads 1"),
    ],
)
def test_a_changed_list_of_modules_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    zoo.build(audio=None).save_pretrained(tmp_path / "out")
    told = tmp_path / "out" / "interlace.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        MultimodalModel.from_pretrained(tmp_path / "out")


def test_a_folder_that_is_gone_is_missed(tmp_path: Path) -> None:
    zoo.build(audio=None).save_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "vision")
    with pytest.raises(ValueError, match=r"interlace.json names 'vision', but its folder is missing"):
        MultimodalModel.from_pretrained(tmp_path / "out")


def test_modules_without_a_projector_are_folders(tmp_path: Path) -> None:
    encoders = {"vision": ModalityModule(zoo.siglip(hidden_size=24), projector=None)}
    placeholders = {"vision": zoo.PLACEHOLDERS["vision"]}
    MultimodalModel(encoders, zoo.llama(), placeholders=placeholders).save_pretrained(tmp_path / "out")
    again = MultimodalModel.from_pretrained(tmp_path / "out")
    assert again.encoders["vision"].projector is None


def test_what_a_folder_would_lose_is_refused(tmp_path: Path) -> None:
    """Functions, and settings that are not in the weights."""
    mllm = zoo.build(audio=None)
    encoder, settings = mllm.encoders["vision"], mllm.language_settings
    for owner, key, value, message in (
        (encoder, "_tokens", lambda shape, about: 4, "vision has a tokens function"),
        (encoder, "_collate", lambda items: {}, "vision has a collate function"),
        (encoder, "layer_path", "encoder.others", "vision has layers='encoder.others', which cannot be stored"),
        (settings, "layer_path", "model.others", "language_model has layers='model.others'"),
        (settings, "positions", lambda sample: None, "has callbacks, which cannot be stored"),
        (settings, "deepstack", 1, "DeepStack"),
    ):
        before = getattr(owner, key)
        setattr(owner, key, value)
        with pytest.raises(ValueError, match=message):
            mllm.save_pretrained(tmp_path / "out")
        setattr(owner, key, before)
    assert not list(tmp_path.iterdir())
    mllm.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("shards", [None, "20KB"])
def test_dtype_falls_back_to_that_of_the_weights(tmp_path: Path, shards: str | None) -> None:
    wholes.llava().to(torch.bfloat16).save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / "model.safetensors").exists() == (shards is None)
    config = json.loads((tmp_path / "config.json").read_text())
    for table in (config, config["text_config"], config["vision_config"]):
        table.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(tmp_path) == torch.bfloat16 == read_whole(tmp_path).dtype
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors cannot be read"):
        dtype_of(tmp_path)


def test_what_comes_along_beside_the_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "onnx").mkdir()
    target.mkdir()
    for name in ("additional_chat_templates/tool.jinja", "tokenizer.json", "config.json", "adapter_config.json"):
        (source / name).write_text("source")
    for name in ("model.safetensors", "model.gguf", "model.onnx", "last.ckpt", "onnx/model.onnx"):
        (source / name).write_text("weights")
    (target / "config.json").write_text("target")
    copy_companions(source, target)
    result = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert result == ["additional_chat_templates/tool.jinja", "config.json", "tokenizer.json"]
    assert (target / "config.json").read_text() == "target"
