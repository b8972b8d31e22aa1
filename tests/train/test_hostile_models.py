"""[model] tables that name the wrong thing: a one-line error each, with the place in the config and the fix."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.data import ByteTokenizer
from interlace.run import parallelize
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from interlace.train.models.build import build, build_layout, stored_weights
from interlace.train.models.media_specs import check_inputs
from tests.train.build import TABLE

OWN = "tests.train.own_modules"
WRONG = [
    ("model.vision.architecture=SiglipVisionMdoel", "no model 'SiglipVisionMdoel'; did you mean 'SiglipVisionModel'?"),
    ("model.vision.architecture=Eye", "no model 'Eye'; give the name of a class, such as SiglipVisionModel or"),
    ("model.vision.architecture='os.system'", "no model 'os.system'"),
    ("model.vision.architecture=CLIPConfig", "CLIPConfig of transformers is not a model class"),
    ("model.vision.architecture=PreTrainedModel", "PreTrainedModel is a base class of transformers"),
    ("model.vision.architecture=LlamaForCausalLM", "LlamaForCausalLM reads token ids, so it cannot be an encoder"),
    ("model.vision.architecture=CLIPModel", "is a model of several parts, .* of its parts CLIPVisionModel can"),
    ("model.vision.architecture=llava", "LlavaModel is a model of several parts, so it cannot be an encoder"),
    ("model.vision.architecture=DetrForObjectDetection", "DetrForObjectDetection has a task head: .*use DetrModel"),
    ("model.vision.architecture=ViTForImageClassification", "has a task head: .*; use ViTModel"),
    ("model.vision={architecture='ResNetModel'}", r"\[model.vision\]: ResNetModel "),
    ("model.language_model.architecture=Qwen3ForCasualLM", "did you mean 'Qwen3ForCausalLM'?"),
    ("model.language_model.architecture=LlamaModel", "LlamaModel is not a causal language model; use LlamaForCausalLM"),
    ("model.language_model.architecture=SiglipVisionModel", "SiglipVisionModel is not a causal language model"),
    ("model.language_model.architecture=gemma3", "a model of several parts; give the class of its language"),
    ("model.language_model.architecture=t5", "no class for 't5' that can be the language model"),
    ("model.vision.config.hiden_size=4", "no key 'hiden_size' for SiglipVisionModel; did you mean 'hidden_size'?"),
    ("model.vision.config={hidden_act='glu'}", r"\[model.vision.config\] SiglipVisionModel: "),
    ("model.vision.unset=['hiden_size']", r"\[model.vision\] unset: 'hiden_size' is not a key .* mean 'hidden_size'?"),
    ("model.vision.unset=['hidden_size']", "unset: 'hidden_size' is not a key that can be None"),
    ("model.vision.projector='nowhere.at_all:Projector'", "cannot import nowhere.at_all: No module named 'nowhere'"),
    (f"model.vision.projector='{OWN}:Bottelneck'", "has no 'Bottelneck'; did you mean 'Bottleneck'?"),
    (f"model.vision.projector='{OWN}:half'", "half' is not a subclass of torch.nn.Module"),
    (f"model.vision.projector='{OWN}:Scaled'", r"Scaled has 'scale' but no reset_parameters\(\) that initialises it"),
    (f"model.vision.projector='{OWN}:Loose'", "has the plain tensor 'shift': use register_buffer"),
    (f"model.vision.projector='{OWN}:Narrow'", r"makes \[6, 15\] of features \[6, 16\], expected \[6, 16\]"),
    (f"model.vision.projector='{OWN}:TakesTwo'", r"does not take features \[6, 16\]: .*missing 1 required"),
    (f"model.vision.projector='{OWN}:Raises'", "projector Raises cannot be made: RuntimeError: no such luck"),
    ("model.vision.projector_config={scale=2}", r"projector mlp is called with .*unexpected keyword argument 'scale'"),
    ("model.vision={projector='qformer',projector_config={headss=2}}", "its arguments after the first two: queries, "),
    ("model.vision={projector='qformer',projector_config={heads=3}}", "3 heads do not divide the qformer's width 16"),
    ("model.vision={projector='qformer',projector_config={queries=0}}", "integers of at least 1, not queries = 0"),
    ("model.vision={projector='pixel_shuffle',projector_config={scale=1.5}}", "must be 1 or more, not 1.5"),
    (f"model.vision.postprocess='{OWN}:NOTHING'", "postprocess = .*NOTHING' is a int, not a function"),
    (f"model.vision.postprocess='{OWN}:no_arguments'", r"no_arguments' must take \(inputs, output\), not \(\)"),
    (f"model.vision.preprocess='{OWN}:half'", r"half' must take \(inputs\), not"),
    (
        "model.vision={architecture='qwen2_5_vl_vision',config={hidden_size=16,out_hidden_size=16,intermediate_size=24,"
        "depth=1,num_heads=2,patch_size=4,window_size=16}}",
        "does not take images .* the items of the dataset 'tests.digits:Digits': use another encoder or another",
    ),
    (
        "model.audio={architecture='ASTModel',config={hidden_size=16,intermediate_size=24,num_hidden_layers=1,"
        "num_attention_heads=2,num_mel_bins=16,max_length=64}}",
        r"ASTModel does not take \(mel bins, frames\) of 10 ms, the items of the dataset",
    ),
    ("model.train={architecture='ViTModel'}", r"\[model\]: .*'train'"),
]


def table_with(override: str) -> configs.Config:
    """The override's table is merged, so that a case has only the mistake."""
    keys, value = configs.parse_override(override)
    table = copy.deepcopy(TABLE)
    if isinstance(value, dict) and len(keys) == 2 and "architecture" not in value:
        value = table["model"][keys[1]] | value
    configs.set_key(table, keys, value, override)
    return configs.from_table(table, source="hostile.toml")


def made(config: configs.Config) -> None:
    model: Any = build(config, ByteTokenizer(config.model.encoders()), source="hostile.toml")
    build_layout(config, model, source="hostile.toml")
    check_inputs(config, model, source="hostile.toml")


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_model_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as error:
        made(table_with(override))
    text = str(error.value)
    assert "hostile.toml: [model" in text and "\n" not in text and "Traceback" not in text, text


def test_what_is_right_is_built() -> None:
    """The same table without mistakes is accepted. Otherwise the cases above would prove nothing."""
    made(table_with(f"model.vision.projector='{OWN}:Bottleneck'"))
    made(table_with(f"model.vision={{projector='{OWN}:Mean',postprocess_projector='{OWN}:half'}}"))


FOLDERS = [
    ({}, "config.json: cannot read it: No such file"),
    ({"config.json": "{"}, "config.json is not valid JSON"),
    ({"config.json": "[]"}, "config.json is not a JSON object"),
    ({"config.json": "{}"}, "has model_type = None, which transformers 5.* does not know"),
    ({"config.json": '{"model_type": "my_vit"}'}, "has model_type = 'my_vit', which transformers 5.* does not know"),
    ({"config.json": '{"model_type": "llama"}'}, "has model_type = 'llama', of which no class takes images or sound"),
    ({"config.json": '{"model_type": "resnet"}'}, r"\[model.vision\]: ResNetModel "),
    ({"config.json": '{"model_type": "vit", "num_hidden_layers": "two"}'}, "num_hidden_layers"),
    (
        {"config.json": '{"model_type": "qwen2_5_omni_thinker"}'},
        "holds several that can be an encoder; give architecture",
    ),
    ({"config.json": json.dumps({"model_type": "vit", "num_hidden_layers": 1})}, "has no model.safetensors"),
    (
        {"config.json": json.dumps({"model_type": "vit", "num_hidden_layers": 1}), "pytorch_model.bin": "x"},
        "only the pickle pytorch_model.bin",
    ),
    (
        {"config.json": json.dumps({"model_type": "vit", "num_hidden_layers": 1}), "model.safetensors": "x"},
        "model.safetensors is damaged",
    ),
]


@pytest.mark.parametrize(("files", "message"), FOLDERS)
def test_a_folder_that_holds_no_encoder_is_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        table = copy.deepcopy(TABLE)
        table["model"]["vision"] = {"path": str(tmp_path)}
        config = configs.from_table(table, source="hostile.toml")
        model = build(config, ByteTokenizer(), source="hostile.toml")
        stored_weights(config, model, source="hostile.toml")
    assert str(error.value).startswith("hostile.toml: [model.vision") and "\n" not in str(error.value)


def test_the_command_says_it_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    table = copy.deepcopy(TABLE)
    table["model"]["vision"]["architecture"] = "SiglipVisionMdoel"
    path.write_text(configs.dumps(configs.from_table(table)))
    assert main(["plan", str(path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "did you mean 'SiglipVisionModel'?" in lines[0] and str(path) in lines[0]


NOT_FED = {
    "a tower of patches": (
        ""
        "model.vision={architecture='Qwen2VisionTransformerPretrainedModel',config={embed_dim=16,hidden_size=16,depth=1,num_heads=2,patch_size=4}}",
        "Qwen2VisionTransformerPretrainedModel does not take images (3, height, width) of square patches",
    ),
    "an encoder of waves": (
        "model.audio={architecture='Wav2Vec2Model',config={hidden_size=16,intermediate_size=24,num_hidden_layers=1,"
        "num_attention_heads=2,conv_dim=[8],conv_kernel=[10],conv_stride=[5],num_conv_pos_embeddings=4,num_conv_pos_embedding_groups=2,mask_time_prob=0.0,layerdrop=0.0,attention_dropout=0.0}}",
        "Wav2Vec2Model does not take (mel bins, frames) of 10 ms",
    ),
}
COMMANDS = {
    "train": ["train"],
    "plan": ["plan", "--tflops", "1"],
    "simulate": ["simulate", "--tflops", "1"],
    "auto": ["plan", "choose", "--gpus", "2", "--memory", "10", "--tflops", "1"],
    "mask": ["mask"],
}


@pytest.mark.parametrize("case", NOT_FED)
def test_every_command_refuses_what_training_refuses(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override, message = NOT_FED[case]
    path = tmp_path / "mine.toml"
    path.write_text(configs.dumps_table(TABLE))
    said = {}
    for name, command in COMMANDS.items():
        changes = [override, f'run.folder="{tmp_path / "runs"}"', f'data.cache="{tmp_path / "cache"}"']
        words = [word for change in changes for word in ("--set", change)]
        assert main([*command, str(path), *words]) == 2, name
        said[name] = capsys.readouterr().err.strip().splitlines()
    assert len(said["plan"]) == 1 and message in said["plan"][0]
    assert all(lines == said["plan"] for lines in said.values()), said


def test_plan_refuses_a_cut_that_training_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 adds positions between its embeddings and its layers, with weights that only its first stage has."""
    table = copy.deepcopy(TABLE)
    del table["model"]["audio"]
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "n_inner": 24, "attn_pdrop": 0.0}
    table["model"]["language_model"] = {"architecture": "GPT2LMHeadModel", "config": sizes}
    path = tmp_path / "mine.toml"
    path.write_text(configs.dumps_table(table | {"parallel": {"language_model": {"pp": 2}}}))
    made = configs.load(path)
    model: Any = build(made, ByteTokenizer(made.model.encoders()), source=str(path))
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot start after its first layers") as error:
        parallelize(model, build_layout(made, model, source=str(path)))
    for command in (["plan"], ["simulate", "--out", str(tmp_path)]):
        assert main([command[0], str(path), "--tflops", "1", *command[1:]]) == 2
        assert capsys.readouterr().err.strip() == f"interlace: {path}: [parallel]: {error.value}"
