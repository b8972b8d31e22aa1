"""Bad input: each message says what is wrong, where, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from interlace.model import Media, ModalityModule, MultimodalModel, Sample
from tests.model import wholes
from tests.model.zoo import MELS, build, clip, llama, qwen2, sample, siglip, whisper


def ids(*values):
    return torch.tensor(values)


def test_sample_and_media_contradictions():
    with pytest.raises(ValueError, match=r"3 input_ids but 2 labels"):
        Sample(ids(1, 2, 3), ids(1, 2))
    with pytest.raises(TypeError, match=r"'x': input_ids must be an int64"):
        Sample(torch.ones(3), ids(1, 2, 3), name="x")
    with pytest.raises(ValueError, match=r"no tokens"):
        Sample(ids().long(), ids().long())
    with pytest.raises(ValueError, match=r"shape \(3, 4, 4\) but its data has \(3, 4, 8\)"):
        Media((3, 4, 4), 1, torch.zeros(3, 4, 8))
    with pytest.raises(TypeError, match=r"normalise"):
        Media((3, 4, 4), 1, torch.zeros(3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"tokens=0"):
        Media((3, 4, 4), 0)
    with pytest.raises(ValueError, match=r"is empty"):
        Media((3, 0, 4), 1)


def image(tokens=1, shape=(3, 4, 4)):
    return Media(shape, tokens, torch.zeros(shape))


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            Sample(ids(1, 46, 46), ids(1, 1, 1), {"vision": [image()]}, "s7"),
            r"'s7'.* 2 placeholders \(id 46\).* 1 token",
        ),
        (Sample(ids(1, 46), ids(1, 1), {}, "s8"), "'s8'.* 1 placeholders .*0 media items become 0"),
        (
            Sample(ids(1, 46), ids(1, 1), {"vision": [image(2)]}, "s9"),
            r"'s9', vision item 0.* has tokens = 2, but .* makes 1",
        ),
        (Sample(ids(1), ids(1), {"vison": [image()]}, "s10"), "'s10' has 'vison' media.*did you mean 'vision'"),
        (
            Sample(ids(1, 47), ids(1, 1), {"audio": [Media((MELS, 33), 1)]}, "long"),
            "'long', audio item 0: audio of 33 frames is too long .* 32 frames.*max_source_positions to 17",
        ),
        (
            Sample(ids(1, 46), ids(1, 1), {"vision": [image(shape=(3, 5, 4))]}, "rim"),
            "'rim'.* 5 x 4 .*multiples of the patch, 4",
        ),
        (
            Sample(ids(1, 46), ids(1, 1), {"vision": [image(shape=(1, 4, 4))]}, "grey"),
            r"\(1, 4, 4\).*\(3, height, width\)",
        ),
        (
            Sample(ids(46, 46, 5, 46), ids(1, 1, 1, 1), {"vision": [image(), image(2, (3, 4, 8))]}, "gap"),
            r"'gap', vision item 1: its 2 placeholders \(id 46\) between positions 1 and 3 .* not consecutive",
        ),
        (Sample(ids(1, 48), ids(1, 1), {}, "id"), r"'id': input_ids\[1\] is 48, but .* 0 to 47: use the tokenizer"),
        (Sample(ids(-100), ids(1), {}, "id"), r"'id': input_ids\[0\] is -100"),
        (Sample(ids(1, 2), ids(-100, 99), {}, "id"), r"'id': labels\[1\] is 99, but .* 0 to 47, or -100 for no target"),
        (Sample(ids(1, 2), ids(-1, 2), {}, "id"), r"'id': labels\[0\] is -1"),
        (Sample(ids(1, 47), ids(1, 1), {"audio": [Media((4, 9), 1)]}, "mel"), r"\(4, 9\).*\(8 mel bins, frames\)"),
    ],
)
def test_samples_that_do_not_fit_the_model(one, message):
    mllm = build()
    with pytest.raises(ValueError, match=message):
        mllm.collate([one])


def test_sample_longer_than_the_positions():
    mllm = build(None, None, max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"'big' has 18 tokens .* positions for 16"):
        mllm.collate([sample(mllm, torch.Generator().manual_seed(0), 17, name="big")])
    with pytest.raises(ValueError, match=r"at least one sample"):
        mllm.collate([])


def test_features_that_do_not_match_placeholders():
    mllm = build()
    one = sample(mllm, torch.Generator().manual_seed(0), ("vision", 8, 8), 3)
    batch = mllm.collate([one])
    batch.pop("vision")
    with pytest.raises(ValueError, match=r"vision: input_ids hold 4 placeholders \(id 46\) but the encoder gave 0"):
        mllm(**batch)
    with pytest.raises(ValueError, match=r"inputs for 'visio'.*did you mean 'vision'"):
        mllm(**batch, visio={})
    wrong = MultimodalModel(
        {"vision": ModalityModule(siglip(), projector=nn.Linear(16, 7))}, llama(), placeholders={"vision": 46}
    )
    with pytest.raises(ValueError, match=r"size 7.*have size 24"):
        wrong(**wrong.collate([one]))


def test_undecoded_media_on_the_first_stage():
    mllm = build()
    one = Sample(ids(1, 46), ids(2, -100), {"vision": [Media((3, 4, 4), 1)]})
    with pytest.raises(ValueError, match=r"not decoded"):
        mllm(**mllm.collate([one]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placeholders": {}}, "no placeholder for encoder 'vision'"),
        ({"placeholders": {"vision": 48}}, "id 48 of 'vision' is outside .* vocabulary of 48.*at least 49"),
        ({"placeholders": {"vision": 46, "video": 47}}, "placeholder for 'video'"),
        ({"generators": {"image": nn.Identity()}}, "generators .image. are not supported"),
        ({"language_model": None}, "needs a language_model"),
        ({"encoders": {"language_model": None}, "placeholders": {"language_model": 1}}, "must be a ModalityModule"),
    ],
)
def test_parts_that_do_not_fit(changes, message):
    vision = {"vision": ModalityModule(siglip())}
    given = {"encoders": vision, "language_model": llama(), "placeholders": {"vision": 46}, **changes}
    with pytest.raises(ValueError, match=message):
        MultimodalModel(**given)


def test_placeholders_of_the_config():
    for image, audio in (("image_token_id", "audio_token_id"), ("image_token_index", "audio_token_index")):
        encoders = {"eyes": ModalityModule(siglip()), "audio": ModalityModule(whisper())}
        model = MultimodalModel(encoders, llama(**{image: 46, audio: 47}), generators={})
        assert model.placeholders == {"eyes": 46, "audio": 47}
    own = MultimodalModel({"eyes": ModalityModule(siglip())}, llama(image_token_id=46), placeholders={"eyes": 45})
    assert own.placeholders == {"eyes": 45}
    with pytest.raises(ValueError, match=r"no placeholder for encoder 'audio': pass placeholders="):
        MultimodalModel({"audio": ModalityModule(whisper())}, llama(image_token_id=46))


def test_shared_placeholder():
    encoders = {"vision": ModalityModule(siglip()), "audio": ModalityModule(whisper())}
    with pytest.raises(ValueError, match=r"share a placeholder"):
        MultimodalModel(encoders, llama(), placeholders={"vision": 46, "audio": 46})


def test_modules_that_cannot_be_used():
    with pytest.raises(ValueError, match=r"unknown projector 'mpl': use linear, mlp"):
        ModalityModule(siglip(), projector="mpl")
    with pytest.raises(ValueError, match=r"downsample is 0"):
        ModalityModule(siglip(), downsample=0)
    with pytest.raises(ValueError, match=r"no nn.ModuleList of layers.*layers='path"):
        ModalityModule(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"has no ModuleList 'layers'.*encoder.layers"):
        ModalityModule(siglip(), layers="layers")

    class TwoTowers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.ModuleList([nn.Linear(2, 2)])
            self.right = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(ValueError, match=r"several lists of layers \(left, right\)"):
        ModalityModule(TwoTowers())

    class Sound(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, waveform):
            return waveform

    with pytest.raises(ValueError, match=r"takes none of .*: pass a model of image, audio or text"):
        ModalityModule(Sound())

    class Grid(Sound):
        def forward(self, hidden_states, grid_thw):
            return hidden_states

    with pytest.raises(ValueError, match=r"Grid is not a supported image encoder"):
        ModalityModule(Grid())


def test_ranges_and_names_of_slices():
    mllm = build()
    for start, stop in ((0, 4), (2, 2), (-1, 1), (3, 2)):
        with pytest.raises(
            ValueError, match=rf"vision: layers {start} to {stop} .* 3 layers.*at most one stage per layer"
        ):
            mllm.slice("vision", start, stop)
    with pytest.raises(ValueError, match=r"unknown module 'visoin'.*did you mean 'vision'"):
        mllm.slice("visoin", 0, 1)
    with pytest.raises(ValueError, match=r"unknown module"):
        mllm.collate([], only={"video"})
    batch = mllm.collate_module("vision", [sample(mllm, torch.Generator().manual_seed(0), ("vision", 4, 4), 2)])
    with pytest.raises(ValueError, match=r"vision \[1:3\] needs the previous stage's hidden state"):
        mllm.slice("vision", 1, 3)(batch)
    with pytest.raises(ValueError, match=r"vision \[0:3\] takes no hidden state"):
        mllm.slice("vision", 0, 3)(batch, torch.zeros(1, 1, 16))


def test_an_auxiliary_loss_of_routers_is_not_dropped_silently():
    with pytest.raises(ValueError, match=r"output_router_logits=True.*set config.output_router_logits to False"):
        build(None, None, language=lambda: llama(output_router_logits=True))


def test_attention_dropout_is_refused_in_training():
    mllm = build(None, None, language=lambda: qwen2(attention_dropout=0.1))
    batch = mllm.collate([sample(mllm, torch.Generator().manual_seed(0), 4)])
    mllm.eval()(**batch)
    with pytest.raises(
        ValueError, match=r"Qwen2Attention has attention dropout .*\(attention_dropout = 0\.1 in Qwen2Config\)"
    ):
        mllm.train()(**batch)


def test_postprocess_that_changes_the_number_of_tokens():
    vision = ModalityModule(clip(), downsample=2, postprocess=lambda inputs, output: output[:3])
    vision.connect(24)
    with pytest.raises(ValueError, match=r"postprocess made 3 tokens of 4.*downsample=1"):
        vision(pixel_values=[torch.zeros(3, 8, 8)])


@pytest.mark.parametrize(
    ("name", "callback", "message"),
    [
        ("tokens", lambda shape: 4, r"tokens = .*<lambda> must take \(shape, about\), not \(shape\)"),
        ("tokens", 7, "tokens = 7 is a int, not a function"),
        ("preprocess", lambda: {}, r"preprocess = .*<lambda> must take \(inputs\), not \(\)"),
        ("postprocess", lambda output: output, r"must take \(inputs, output\)"),
        ("postprocess_projector", "mlp", "postprocess_projector = 'mlp' is a str"),
        ("collate", lambda items, more: {}, r"must take \(items\), not \(items, more\)"),
    ],
)
def test_callbacks_are_checked_when_given(name, callback, message):
    with pytest.raises(TypeError, match=message):
        ModalityModule(siglip(), **{name: callback})


@pytest.mark.parametrize("count", [None, "4", 4.0, 0, -1, True])
def test_a_tokens_callback_must_return_a_number(count):
    vision = ModalityModule(siglip(), tokens=lambda shape, about: count)
    with pytest.raises(
        ValueError, match=rf"callback tokens = .*<lambda> gave {count!r} for an item of shape .* int of at"
    ):
        vision.tokens((3, 8, 8))


def test_a_tokens_callback_that_fails_is_named():
    vision = ModalityModule(siglip(), tokens=lambda shape, about: about["frames"])
    with pytest.raises(ValueError, match=r"callback tokens = .* raised KeyError: 'frames'"):
        vision.tokens((3, 8, 8))


@pytest.mark.parametrize(
    "callbacks", [{"tokens": lambda shape, about: 3}, {"postprocess_projector": lambda i, f: f[:3]}]
)
def test_callbacks_that_disagree_about_the_number_of_features(callbacks):
    vision = ModalityModule(siglip(), **callbacks)
    vision.connect(24)
    with pytest.raises(
        ValueError, match=r"made [34] features of 1 items of [34] tokens in total: the callback tokens must"
    ):
        vision(pixel_values=[torch.zeros(3, 8, 8)])
    nothing = ModalityModule(siglip(), postprocess_projector=lambda inputs, features: None)
    nothing.connect(24)
    with pytest.raises(ValueError, match="made a NoneType instead of features"):
        nothing(pixel_values=[torch.zeros(3, 8, 8)])


def test_what_is_no_list_of_samples_is_named():
    mllm = build(None, None)
    one = sample(mllm, torch.Generator().manual_seed(0), 4)
    with pytest.raises(ValueError, match=r"collate takes samples, not a dict: make them with interlace.model.Sample"):
        mllm.collate([vars(one)])
    with pytest.raises(ValueError, match="collate takes a list of samples, not a Sample: put it in a list"):
        mllm.collate(one)
    with pytest.raises(ValueError, match="generate takes samples, not a dict"):
        mllm.generate(vars(one))
    with pytest.raises(TypeError, match=r"takes a batch, not a list: call mllm\(\*\*mllm.collate\(samples\)\)"):
        mllm([one])


def mllama_text():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    given = {"num_key_value_heads": 1, "vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return MllamaForCausalLM(MllamaTextConfig(**sizes, **given, cross_attention_layers=[1, 3]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mllama_text, r"MllamaForCausalLM has layers that only features .* come through, 1, 3 of 'model.layers'"),
        (wholes.CASES["llava"].make, r"LlavaForConditionalGeneration has an encoder of its own, 'model.vision_tower'"),
        (wholes.CASES["qwen2_vl"].make, r"Qwen2VLForConditionalGeneration has an encoder of its own, 'model.visual'"),
    ],
    ids=["cross-attention", "tower", "tower of patches"],
)
def test_language_models_with_unfed_vision_parts_are_refused(make, message):
    """These weights would be trainable but never get a gradient; alone, such models read text."""
    MultimodalModel({}, make())
    with pytest.raises(ValueError, match=message):
        MultimodalModel({"vision": ModalityModule(siglip())}, make(), placeholders={"vision": 46})
