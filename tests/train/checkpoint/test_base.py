"""Checkpoints of runs with weights from a folder contain trained weights only. The folder has the others, or is
refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from interlace.cli import main
from interlace.data import ByteTokenizer
from interlace.data.builtin.byte_tokenizer import write_byte_tokenizer
from interlace.model.patterns import is_adapter
from interlace.parallel.region import Box, Region
from interlace.train.checkpoint.base import prints_of
from interlace.train.checkpoint.checkpoints import Checkpoints, load_parameters, read_manifest
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.pieces import Piece
from interlace.train.checkpoint.storage import CheckpointError
from interlace.train.config.load import dumps
from interlace.train.config.sections import Config
from interlace.train.launch.peers import Peers
from interlace.train.models.build import build, materialize
from interlace.train.models.pretrained import Stored
from interlace.train.selection import Chosen, fill
from tests.train.lanes import assert_same_bits, config_of, contents, curve, newest, train, trainer_of

pytest.importorskip("peft")
SETTINGS = ["train.lr=0.02", "train.warmup_steps=0", "train.steps=4", "train.ema=0.9"]
LORA = "train.lora={rank=3, alpha=6}"
PROJECTOR = ["train.freeze=['*']", "train.train=['*.projector']"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, a language model, and another one of the same sizes."""
    root = tmp_path_factory.mktemp("folders")
    for seed, name in ((3, "llm"), (4, "other")):
        model: Any = materialize(build(config_of("one"), ByteTokenizer()), seed=seed)
        model.language_model.save_pretrained(root / name, max_shard_size="20KB")
    model.encoders["vision"].module.save_pretrained(root / "vision")
    return root


def config_with(folders: Path, *overrides: str, language_model: str = "llm") -> Config:
    paths = [
        f"model.{name}={{path={str(folders / at)!r}}}"
        for name, at in (("vision", "vision"), ("language_model", language_model))
    ]
    return config_of("one", *SETTINGS, *paths, *overrides)


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["lora", pytest.param("projector", marks=pytest.mark.slow)])
def test_frozen_weights_stay_in_base_and_resume_is_bit_exact(folders: Path, tmp_path: Path, kind: str) -> None:
    config = config_with(folders, *([LORA] if kind == "lora" else PROJECTOR))
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", stop=2)
    train(config, tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert_same_bits(tmp_path / "parts", tmp_path / "whole")
    path = newest(tmp_path / "whole")
    held = {key.removeprefix("model.") for key in contents(path) if key.startswith("model.")}
    trained = {name for name, parameter in whole.model.named_parameters() if parameter.requires_grad}
    assert held == trained and any(map(is_adapter, held)) == (kind == "lora")
    assert read_manifest(path).base.keys() == {name for name, _ in whole.model.named_parameters()} - held
    # And one process reads both: for answers, exports and the closing report.
    model = materialize(build(config, ByteTokenizer()), seed=9)
    assert fill(config, model, Chosen(path, False, "")) == 4
    assert all(torch.equal(p, whole.model.get_parameter(name)) for name, p in model.named_parameters())
    without = bytes_of(path)
    whole.checkpoints.base = {}  # as if all were saved
    whole.saving.save()
    whole.checkpoints.finish()
    left_out = sum(p.nbytes for p in whole.model.parameters() if not p.requires_grad)
    assert 0 <= bytes_of(path) - without - left_out < 0.2 * left_out  # headers


def trainer_of_newest(config: Config, folder: Path) -> nn.Module:
    trainer = trainer_of(config, folder)
    for parameter in trainer.parameters.values():
        parameter.data.fill_(float("nan"))  # as in a resumed run: all weights are read
    trainer.resume()
    trainer.feed.close()
    return trainer.model


def test_another_base_is_refused_and_a_moved_one_is_not(folders: Path, tmp_path: Path) -> None:
    config = config_with(folders, LORA)
    train(config, tmp_path / "run", stop=2)
    shutil.copytree(folders / "llm", tmp_path / "elsewhere")
    moved = config_with(folders, LORA, f"model.language_model.path={str(tmp_path / 'elsewhere')!r}")
    trainer_of_newest(moved, tmp_path / "run")
    other = config_with(folders, LORA, language_model="other")
    line = rf"needs the frozen weights of {folders}/llm, but {folders}/other has different ones: language\S+ and \d+"
    with pytest.raises(CheckpointError, match=line):
        trainer_of_newest(other, tmp_path / "run")
    model = build(other, ByteTokenizer())
    with pytest.raises(CheckpointError, match=line) as told:
        fill(other, model, Chosen(newest(tmp_path / "run"), False, ""))
    assert len(str(told.value).splitlines()) == 1
    identity = identity_of(build(config, ByteTokenizer()), read_manifest(newest(tmp_path / "run")).model.architecture)
    with pytest.raises(
        CheckpointError, match=rf"does not contain \S+, which is frozen and stored in {folders}/vision: set"
    ):
        load_parameters(newest(tmp_path / "run"), model, identity)


@pytest.mark.slow
def test_what_was_trained_once_is_never_the_folders_again(folders: Path, tmp_path: Path) -> None:
    """Frozen later, it stays in later checkpoints. A weight unfrozen later is read from the folder before."""
    adapters = config_with(folders, LORA, "train.train=['language_model.model.norm']")
    train(adapters, tmp_path / "run", stop=2)
    norm = contents(newest(tmp_path / "run"))["model.language_model.model.norm.weight"]
    assert not torch.equal(norm, torch.ones_like(norm))
    train(config_with(folders, LORA), tmp_path / "run", resume=True, stop=3)
    again = contents(newest(tmp_path / "run"))
    assert torch.equal(again["model.language_model.model.norm.weight"], norm)
    assert "model.language_model.model.layers.0.input_layernorm.weight" not in again
    opened = config_with(folders, LORA, "train.train=['*.layers.0.mlp.up_proj']")
    model = trainer_of_newest(opened, tmp_path / "run")
    name = "language_model.model.layers.0.mlp.up_proj.base_layer.weight"
    kept = {}
    for file in (folders / "llm").glob("*.safetensors"):
        kept |= load_file(file)
    assert torch.equal(model.get_parameter(name), kept["model.layers.0.mlp.up_proj.weight"])
    trainer = train(opened, tmp_path / "run", resume=True)
    assert f"model.{name}" in contents(newest(tmp_path / "run")) and name not in trainer.checkpoints.base


def test_a_rank_reads_its_pieces_of_a_base(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    save_file({"w": whole}, tmp_path / "base.safetensors")
    sources = {"weight": Stored(tmp_path / "base.safetensors", "w")}
    model = nn.Linear(4, 6)
    store = Checkpoints(
        tmp_path, keep=1, identity=identity_of(model, {}), stored=lambda: sources, frozen={"weight", "unknown"}
    )
    path = store.save(1, dict(model.named_parameters()), {}, {"step": 1})
    assert [key for key in read_manifest(path).tensors if key.startswith("model.")] == ["model.bias"]
    region = Region((6, 4), (Box((1, 0), (2, 4)), Box((4, 0), (2, 4))))
    mine = torch.zeros(4, 4)
    store.load(path, {"weight": Piece(mine, region)}, {})
    assert torch.equal(mine, whole[[1, 2, 4, 5]])
    (tmp_path / "base.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"base.safetensors: cannot read w: .*copy it again"):
        prints_of(sources)


def test_ranks_that_read_different_bases_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(6, 4)}, tmp_path / "base.safetensors")
    sources = {"weight": Stored(tmp_path / "base.safetensors", "w")}
    peers = Peers(1.0)
    monkeypatch.setattr(peers, "together", lambda what, work, **_: [work(), "another print"])
    with pytest.raises(
        CheckpointError, match=rf"ranks \[1\] read different frozen weights from {tmp_path} than rank 0"
    ):
        Checkpoints(
            tmp_path,
            keep=1,
            identity=identity_of(nn.Linear(4, 6), {}),
            peers=peers,
            stored=lambda: sources,
            frozen={"weight"},
        )


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]),
    st.integers(0, 1000),
)
@settings(max_examples=30)
def test_prints_are_of_values_and_not_of_files(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    """Equal for a separate file or a shared one, and for another name; different for other values."""
    import tempfile

    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, shape, generator=generator).float().to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        made = {
            "one": {"w": values},
            "two": {"a": torch.ones(3), "model.w": values},
            "other": {"w": (values.float() + 1).to(dtype)},
        }
        for name, tensors in made.items():
            save_file(tensors, Path(folder) / f"{name}.safetensors")
        one, two, other = (
            prints_of({"w": Stored(Path(folder) / f"{name}.safetensors", [*tensors][-1])})["w"].sha256
            for name, tensors in made.items()
        )
        assert one == two != other
        again = {"w": values.reshape(*shape, 1)}
        save_file(again, Path(folder) / "flat.safetensors")
        assert prints_of({"w": Stored(Path(folder) / "flat.safetensors", "w")})["w"].sha256 != one


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "layer.w"])
def test_rows_of_a_few_words_make_another_print(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.train.checkpoint.base.ROWS", 64)
    values = torch.arange(400.0).reshape(200, 2)
    prints = []
    for trained in ([], [133], [199], range(100, 110)):
        changed = values.clone()
        changed[list(trained)] += 1
        save_file({"w": changed}, tmp_path / "base.safetensors")
        prints.append(prints_of({name: Stored(tmp_path / "base.safetensors", "w")})[name].sha256)
    assert len(set(prints)) == (3 if name == "layer.w" else 4)  # of other matrices, some rows


@pytest.mark.slow
def test_the_commands_read_base_and_checkpoint(folders: Path, tmp_path: Path, capsys: Any) -> None:
    """Train, resume after the folder has moved, answer and export: bits equal those of an uninterrupted run."""
    shutil.copytree(folders / "llm", tmp_path / "llm")
    write_byte_tokenizer(tmp_path / "llm", ["vision"])  # the commands answer with the tokenizer of the folder
    quiet = ["log.samples=0", "log.accuracy_samples=0", "train.validation_samples=8"]
    config = config_with(folders, LORA, "train.steps=2", *quiet, f"model.language_model.path={str(tmp_path / 'llm')!r}")
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path / "runs")})})
    (tmp_path / "config.toml").write_text(dumps(config))
    assert main(["train", str(tmp_path / "config.toml")]) == 0
    [run] = (tmp_path / "runs" / "dropout").glob("2*")
    (tmp_path / "llm").rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "lost")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    there = ["--set", f"model.language_model.path={str(tmp_path / 'moved')!r}"]
    for extra, name in ((["--adapter"], "adapter"), ([], "merged")):
        assert main(["export", str(run), str(tmp_path / name), *extra, *there]) == 0
    assert (
        main(["train", "--resume", str(run), *there, "--set", "train.steps=4", "--set", "train.schedule_steps=2"]) == 0
    )
    assert main(["generate", str(run), "--text", "a", "--max-new-tokens", "2"]) == 0  # new path saved
    train(config_with(folders, LORA, "train.schedule_steps=2"), tmp_path / "unbroken")
    assert_same_bits(run, tmp_path / "unbroken")
