"""Whole checkpoints: cut into modules they compute what HuggingFace's own class does; saved again key for key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.run import parallelize
from tests.model import wholes
from tests.model.zoo import assert_same_gradients

FAMILIES = sorted(wholes.CASES)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Name, folder, HuggingFace's class with its gradients, and the loss and logits of the samples."""
    folder = tmp_path_factory.mktemp(request.param)
    wholes.written(request.param, folder)
    mllm = MultimodalModel.from_pretrained(folder, backend="reference")
    whole = type(wholes.CASES[request.param].make()).from_pretrained(folder, attn_implementation="eager").eval()
    batch = wholes.samples(request.param, mllm)
    loss = wholes.own_loss(request.param, whole, batch)
    loss.backward()
    return request.param, folder, whole, batch, float(loss.detach())


def compare(mllm: MultimodalModel, whole: torch.nn.Module) -> None:
    expected = {name: p.grad for name, p in whole.named_parameters()}
    tied = {id(p): p.grad for p in whole.parameters()}
    found = {mllm.name_in_whole(name): p.grad for name, p in mllm.named_parameters()}
    assert found.keys() == expected.keys() and len(tied) == len(expected)
    unused = {name for name, want in expected.items() if want is None or not want.any()}
    assert all(found[name] is None or not found[name].any() for name in unused)
    assert_same_gradients(found, {name: want for name, want in expected.items() if name not in unused})


def test_same_as_huggingface(family) -> None:
    name, folder, whole, batch, loss = family
    mllm = MultimodalModel.from_pretrained(folder, backend="reference").eval()
    output = mllm(**mllm.collate(batch))
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-5)
    pieces = output.logits[0].split([len(sample) for sample in batch])
    with torch.no_grad():
        for number, (sample, piece) in enumerate(zip(batch, pieces, strict=True)):
            torch.testing.assert_close(piece, wholes.own_logits(name, whole, number, sample), rtol=1e-4, atol=1e-5)
    output.loss.backward()
    compare(mllm, whole)


def test_saved_again_it_is_the_same_file(family, tmp_path: Path) -> None:
    name, folder, whole, batch, _ = family
    (folder / "tokenizer.json").write_text("{}")
    mllm = MultimodalModel.from_pretrained(folder)
    mllm.save_pretrained(tmp_path / "again")
    before, after = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "again"))
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "again" / "tokenizer.json").exists()
    again = type(whole).from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = wholes.own_logits(name, whole, 2, batch[2])
        assert torch.equal(wholes.own_logits(name, again, 2, batch[2]), wanted)
    with pytest.raises(ValueError, match="exists and is not empty"):
        mllm.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("stages", [1, 2])
def test_cut_over_ranks(family, stages: int) -> None:
    _, folder, whole, batch, loss = family
    mllm = MultimodalModel.from_pretrained(folder, backend="reference")
    [encoder, language_model] = mllm.modules_order()
    layout = Layout.from_specs(mllm, {encoder: ParallelSpec(), language_model: ParallelSpec(pp=stages)})
    parallel = parallelize(mllm, layout, schedule="1f1b", transport="local")
    result = parallel.step(batch, microbatches=2)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    compare(mllm, whole)


def test_frozen_parts(family) -> None:
    _, folder, _, batch, _ = family
    mllm = MultimodalModel.from_pretrained(folder, backend="reference")
    [encoder, language_model] = mllm.modules_order()
    mllm.freeze(encoder)
    mllm.freeze(language_model)
    parts = mllm.encoders[encoder].parts
    after = [*(f"{parts.base}.{each}" for each in parts.beside), *(f"model.visual.{each}" for each in parts.mergers)]
    trained = {mllm.name_in_whole(name) for name, p in mllm.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith(tuple(after)) for name in trained)
    mllm(**mllm.collate(batch)).loss.backward()
    assert {mllm.name_in_whole(name) for name, p in mllm.named_parameters() if p.grad is not None} <= trained
    mllm.freeze(f"{encoder}.projector")
    assert not any(p.requires_grad for p in mllm.parameters())
    mllm.unfreeze(f"{encoder}.projector")
    mllm.unfreeze(encoder)
    assert {mllm.name_in_whole(name).split(".")[1] for name, p in mllm.named_parameters() if p.requires_grad} == {
        parts.tower,
        *parts.beside,
    }
