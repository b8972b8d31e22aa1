"""FLOPs of a step, against torch's count for HuggingFace's own modules with eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from interlace.attention.hf.limits import Limits
from interlace.estimate.step_flops import Flops, StepFlops, Uncountable
from interlace.model import Media, ModalityModule, MultimodalModel, Sample, loss
from interlace.model.collate import JOINED, collate_language
from interlace.model.counting.pairs import Document, visible
from interlace.model.lora import add_lora
from tests.run.flops import counted, total
from tests.tiny import FRAMES, MELS, PATCH, PLACEHOLDERS, VOCAB, tiny_mllm

LLM = "language_model"


def eager(module: nn.Module) -> Any:
    """The same module with its library's own attention."""
    again = copy.deepcopy(module)
    again.set_attn_implementation("eager")  # type: ignore[operator]
    if hasattr(again, "set_experts_implementation"):
        again.set_experts_implementation("eager")  # torch does not count grouped products
    return again


def text(length: int, targets: int, ids: int = 3) -> Sample:
    labels = torch.full((length,), -100)
    labels[length - targets :] = 5
    return Sample(torch.full((length,), ids), labels)


def with_item(mllm: Any, name: str, shape: tuple[int, ...], about: Any = None, *, words: int = 4) -> Sample:
    tokens = mllm.encoders[name].tokens(shape, about or {})
    ids = torch.cat([torch.full((tokens,), PLACEHOLDERS[name]), torch.full((words,), 3)])
    labels = torch.full_like(ids, -100)
    labels[-words:] = 5
    return Sample(ids, labels, {name: [Media(shape, tokens, torch.zeros(shape), about=about)]})


def test_an_encoder_of_pictures_and_one_of_sound() -> None:
    mllm = tiny_mllm()
    vision, audio = eager(mllm.encoders["vision"].module), eager(mllm.encoders["audio"].module)
    count = StepFlops(mllm)
    for rows, columns in ((4, 4), (3, 7), (9, 2)):
        shape, n = (3, rows * PATCH, columns * PATCH), rows * columns
        wanted = counted(lambda s=shape: vision(torch.zeros(1, *s), interpolate_pos_encoding=True).last_hidden_state)
        projector = 3 * (2 * n * 16 * 16 * 2)  # two layers of 16 x 16
        assert count.of([with_item(mllm, "vision", shape)])["vision"].model == wanted + projector
    # Whisper also computes and attends to the padding of a clip; a full clip has none.
    wanted = counted(lambda: audio(torch.zeros(1, MELS, FRAMES)).last_hidden_state)
    projector = 3 * (2 * (FRAMES // 4) * 32 * 16)
    assert count.of([with_item(mllm, "audio", (MELS, FRAMES))])["audio"].model == wanted + projector


def test_frozen_encoder_counts_forward_and_projector_backward() -> None:
    mllm = tiny_mllm(encoders=("vision",))
    mllm.freeze("vision")
    vision = eager(mllm.encoders["vision"].module)
    shape = (3, 3 * PATCH, 5 * PATCH)
    wanted = counted(lambda: vision(torch.zeros(1, *shape), interpolate_pos_encoding=True).last_hidden_state)
    layer = 2 * 15 * 16 * 16
    sample = with_item(mllm, "vision", shape)
    # forward and weight gradient of both layers of the projector, input gradient of the second
    assert StepFlops(mllm).of([sample])["vision"].model == wanted + layer * (2 + 2 + 1)


def moe() -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=10, num_experts=6, num_experts_per_tok=2,
        mlp_only_layers=[1], attn_implementation="interlace",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["llama", "tied", "moe"])
def test_a_language_model(kind: str) -> None:
    torch.manual_seed(0)
    mllm = MultimodalModel(language_model=moe()) if kind == "moe" else tiny_mllm(tied=kind == "tied", encoders=())
    plain: Any = eager(mllm.language_model)
    heads, size, layers = 2, 10 if kind == "moe" else 8, 3 if kind == "moe" else 2
    for length in (5, 12):
        wanted = counted(lambda n=length: plain(torch.full((1, n), 3), use_cache=False).logits)
        unseen = length * length - visible(Document(length, True))
        wanted -= 3 * 2 * unseen * heads * 2 * size * layers
        assert StepFlops(mllm).of([text(length, length)])[LLM].model == wanted
    # logits only at positions with a target
    head = 3 * 2 * 16 * VOCAB
    assert StepFlops(mllm).of([text(12, 5)])[LLM].model == wanted - 7 * head


def test_layers_that_look_back_so_far_only() -> None:
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, attn_implementation="interlace", pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    mllm = MultimodalModel(language_model=Gemma3ForCausalLM(config))
    plain, length = eager(mllm.language_model), 13
    wanted = counted(lambda: plain(torch.full((1, length), 3), use_cache=False).logits)
    near, all_before = (visible(Document(length, True), limits) for limits in (Limits(back=4), Limits()))
    wanted -= 3 * 2 * 2 * 16 * (4 * length * length - 3 * near - all_before)
    assert StepFlops(mllm).of([text(length, length)])[LLM].model == wanted


def test_frozen_layers_and_adapters() -> None:
    mllm = tiny_mllm(encoders=("vision",), layers=3)
    mllm.freeze("vision.projector")
    mllm.freeze("vision")
    mllm.freeze(LLM)
    mllm.language_model.model.layers[1].mlp.requires_grad_(True)  # type: ignore[union-attr, index]
    plain: Any = eager(mllm.language_model)
    length = 9

    def wanted() -> int:
        result = counted(lambda: plain(torch.full((1, length), 3), use_cache=False).logits)
        unseen = length * length - visible(Document(length, True))
        # forward of three layers, backward of the one after the trained part
        return result - 2 * unseen * 2 * 16 * (3 + 2 * 1)

    assert StepFlops(mllm).of([text(length, length)])[LLM].model == wanted()
    mllm.language_model.model.layers[1].mlp.requires_grad_(False)  # type: ignore[union-attr, index]
    add_lora(mllm, rank=3, targets=["layers.1.mlp.up_proj"])
    plain = eager(mllm.language_model)
    assert StepFlops(mllm).of([text(length, length)])[LLM].model == wanted()


def test_frozen_language_model_runs_backward_only_with_media() -> None:
    mllm = tiny_mllm(encoders=("vision",))
    mllm.freeze("vision")
    mllm.freeze(LLM)
    plain: Any = eager(mllm.language_model)
    sample = with_item(mllm, "vision", (3, PATCH, 5 * PATCH))
    count, n = StepFlops(mllm), len(sample)
    given = torch.zeros(1, n, 16)
    forward = counted(lambda: plain(inputs_embeds=given, use_cache=False).logits)
    both = counted(lambda: plain(inputs_embeds=given.requires_grad_(), use_cache=False).logits)
    head, attention = 2 * 16 * VOCAB, 2 * 2 * 16 * 2
    unseen = n * n - visible(Document(n, True, ((0, 5),)))
    silent = n * n - visible(Document(n, True))
    assert count.of([sample])[LLM].model == both - attention * unseen * 3 - head * 2 * (n - 4)
    assert count.of([text(n, 4)])[LLM].model == forward - attention * silent - head * (n - 4)
    # The backward covers a whole chunk.
    together, apart = (count.of(each)[LLM] for each in ([sample, text(n, 4)], [text(n, 4)]))
    assert together.model == count.of([sample])[LLM].model + apart.model
    assert together.executed > count.of([sample])[LLM].executed + apart.executed


@pytest.mark.parametrize("windows", [False, True])
def test_an_encoder_that_is_told_about_its_images(windows: bool) -> None:
    sizes: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
    if windows:
        config: Any = Qwen2_5_VLVisionConfig(
            **sizes, hidden_size=16, out_hidden_size=16, intermediate_size=24, window_size=32, fullatt_block_indexes=[1]
        )
        tower: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
    else:
        config = Qwen2VLVisionConfig(**sizes, embed_dim=16, hidden_size=16, mlp_ratio=2)
        tower = Qwen2VisionTransformerPretrainedModel(config)
    language_model = tiny_mllm(encoders=()).language_model
    module = ModalityModule(tower, projector=None)
    mllm = MultimodalModel({"vision": module}, language_model, placeholders={"vision": PLACEHOLDERS["vision"]})
    plain, count = eager(tower), StepFlops(mllm)
    for grid in ((1, 4, 6), (1, 16, 10), (2, 12, 8)):
        shape = (grid[0] * grid[1] * grid[2], 3 * 2 * 4 * 4)
        wanted = counted(lambda g=grid, s=shape: plain(torch.zeros(s), grid_thw=torch.tensor([g])).pooler_output)
        result = count.of([with_item(mllm, "vision", shape, {"grid_thw": grid})])["vision"]
        assert result.model == wanted


def test_sizes_without_a_rule_are_run_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = tiny_mllm(encoders=("vision",))
    count = StepFlops(mllm)
    encoder = count.encoders["vision"]
    monkeypatch.setattr("interlace.model.counting.flops.KEPT", 4)
    sizes = [with_item(mllm, "vision", (3, PATCH, PATCH * n)) for n in range(1, 9)]
    for sample in sizes:
        count.of([sample])
        assert len(encoder._works) <= 4
    monkeypatch.setattr("interlace.model.counting.flops.SHAPES", len(encoder._works) + 1)
    encoder._rule = None
    count.of(sizes[:1])
    with pytest.raises(Uncountable, match="the FLOPs of vision are not a function of the item size"):
        count.of(sizes[1:2])


@pytest.mark.parametrize("way", [True, False, JOINED])
def test_items_that_touch(way: bool | str) -> None:
    mllm = tiny_mllm()
    mllm.language_settings.bidirectional = way
    samples = []
    for name, shape in (("vision", (3, 8, 8)), ("audio", (MELS, FRAMES))):
        count = mllm.encoders[name].tokens(shape)
        item = Media(shape, count, torch.zeros(shape))
        samples.append((torch.full((count,), PLACEHOLDERS[name]), item))
    (picture, one), (sound, clip) = samples
    words = torch.full((3,), 3)
    ids = torch.cat([words, picture, picture, sound, picture, words, picture])
    sample = Sample(ids, torch.full_like(ids, -100), {"vision": [one] * 4, "audio": [clip]})
    mask = collate_language([sample], mllm.encoders, PLACEHOLDERS, bidirectional=way)["mask"]
    spans = StepFlops(mllm)._spans(sample)
    assert visible(Document(len(ids), True, spans)) == int(mask.to_dense().sum())


def test_what_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = tiny_mllm(encoders=())
    sample = text(100, 50)
    needed, executed = StepFlops(mllm).of([sample])[LLM]
    # One block holds all pairs; five products in the backward, four in theory.
    width, seen = 2 * 2 * 8 * 2, visible(Document(100, True))
    assert executed - needed == width * 2 * (100 * 100) * (1 + 2.5) - width * 2 * seen * 3
    again = StepFlops(mllm, recompute=True).of([sample])[LLM]
    layer = 2 * 100 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24)
    assert again == Flops(needed, executed + 2 * layer + width * 2 * 100 * 100)
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * VOCAB * 20)
    assert StepFlops(mllm).of([sample])[LLM] == Flops(needed, executed + 2 * 50 * 16 * VOCAB)


def test_flops_do_not_depend_on_microbatches() -> None:
    mllm = tiny_mllm()
    samples = [with_item(mllm, "vision", (3, 4 * PATCH, n * PATCH)) for n in (1, 2, 3)] + [text(30, 3), text(7, 2)]
    count = StepFlops(mllm)
    whole, apart = count.of(samples), [count.of([sample]) for sample in samples]
    for name in mllm.modules_order():
        assert whole[name].model == sum(each[name].model for each in apart)
    assert whole["audio"] == Flops(0, 0)
    assert total(whole).model == sum(each.model for each in whole.values())
