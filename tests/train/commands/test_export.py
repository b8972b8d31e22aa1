"""Files beside the weights in an export of a model of modules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from interlace.cli import main
from interlace.data.builtin.byte_tokenizer import write_byte_tokenizer
from interlace.model import MultimodalModel
from interlace.train.checkpoint.checkpoints import Checkpoints
from interlace.train.checkpoint.identity import identity_of
from interlace.train.commands import export
from interlace.train.commands.export import _companions, _for_transformers_5
from interlace.train.commands.reloaded import Checked
from interlace.train.config.data import Data
from interlace.train.config.load import dumps, loads
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.architectures import pixel_statistics
from interlace.train.models.build import architecture, build, materialize
from tests.data.chat_families import trained
from tests.data.chat_faults import TEMPLATE
from tests.model import zoo
from tests.model.older import folder_of
from tests.train.own_data import CONFIG


def test_tokenizer_and_pixels_of_a_run_on_chats_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>"))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    text = CONFIG.format(folder=tmp_path).replace("downsample = 2", "mean = [0.1, 0.2, 0.3]\nstd = [1.0, 1.0, 0.5]")
    config = loads(text.replace("max_tokens", f'chat_template = "{tmp_path}/template.jinja"\nmax_tokens'))
    model = materialize(build(config, tokenizer_of(config)), seed=0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dumps(config))
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    identity = identity_of(model, architecture(config))
    Checkpoints(run / "checkpoints", keep=1, identity=identity).save(1, held, {}, {"step": 1})
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    [output] = [line for line in capsys.readouterr().out.splitlines() if "transformers 4" in line]
    assert output.startswith(f"{tmp_path}/out/language_model/config.json: load it with transformers 5;")
    calls: list[str] = []  # as trained, with adapters beside the layers, before any file is written
    for where, name, result in (
        ("train.commands.reloaded", "ask", "asked"), ("model.lora", "merge_adapters", None),
        ("train.commands.reloaded", "check", Checked(1, 1, 0)),
    ):  # fmt: skip
        monkeypatch.setattr(
            f"interlace.{where}.{name}", lambda *_, name=name, result=result: calls.append(name) or result
        )
    assert main(["export", str(run), str(tmp_path / "checked"), "--check", "1"]) == 0
    assert calls == ["ask", "merge_adapters", "check"]
    again = AutoTokenizer.from_pretrained(tmp_path / "out" / "language_model")
    assert again.convert_tokens_to_ids("<image>") == model.placeholders["vision"]
    assert again.chat_template == TEMPLATE
    pixels = ([0.1, 0.2, 0.3], [1.0, 1.0, 0.5])
    assert pixel_statistics("siglip_vision_model", tmp_path / "out" / "vision") == pixels
    MultimodalModel.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "twice")
    assert pixel_statistics("siglip_vision_model", tmp_path / "twice" / "vision") == pixels
    assert (tmp_path / "twice" / "language_model" / "tokenizer.json").exists()


def test_export_check_of_whole_checkpoint_needs_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(model=SimpleNamespace(path="llava"), data=Data(dataset="tests.digits:Digits"))
    monkeypatch.setattr(export, "checkpoint_of", lambda run: (tmp_path, None))
    monkeypatch.setattr(export, "load", lambda *_, **__: config)
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--check", "3"]) == 2
    assert (
        "--check 3 asks a whole checkpoint by its processor, which reads chats, and the data are tests.digits:Digits"
        in capsys.readouterr().err
    )


def test_weights_in_another_layout_than_the_source_are_named(tmp_path: Path) -> None:
    """HuggingFace transposes the experts of an older Qwen3-VL-MoE on loading, but not on saving."""
    source, target = folder_of("qwen3_vl_moe", tmp_path / "source"), tmp_path / "out"
    MultimodalModel.from_pretrained(source).save_pretrained(target)
    [line] = _for_transformers_5(target, source)
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    assert line == f"{target}: load it with transformers 5; {key} is [4, 24, 8], in {source} [4, 8, 24]"


@pytest.mark.parametrize("mean", ["", "mean = [0.5, 0.5, 0.5]\n"])
def test_what_lies_beside_the_modules_of_a_run_goes_along(tmp_path: Path, mean: str) -> None:
    model = zoo.build(audio=None)
    vision, language_model, out = (tmp_path / name for name in ("siglip", "llama", "out"))
    model.encoders["vision"].module.save_pretrained(vision)
    model.language_model.save_pretrained(language_model)
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.5], "size": 16}
    (vision / "preprocessor_config.json").write_text(json.dumps(said))
    write_byte_tokenizer(language_model, ["vision"])
    config = loads(
        f'[model.vision]\npath = "{vision}"\n{mean}[model.language_model]\npath = "{language_model}"\n'
        '[data]\ndataset = "tests.digits:Digits"\n[run]\nname = "beside"\n[train]\nsteps = 20\nbatch_size = 1\n'
    )
    model.save_pretrained(out)
    _companions(config, model, out, "config")
    assert (out / "language_model" / "tokenizer.json").exists()
    result = json.loads((out / "vision" / "preprocessor_config.json").read_text())
    assert result["image_mean"] == ([0.5, 0.5, 0.5] if mean else [0.1, 0.2, 0.3]) and result["size"] == 16
