"""LoRA: peft's own forward is the oracle. Frozen weights keep their bits. Adapters are exported to peft and merged."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from interlace.data import ByteTokenizer
from interlace.model import Sample
from interlace.model.lora import adapter_files, merge_adapters
from interlace.model.patterns import base_name, is_adapter
from interlace.run import parallelize, stage_graph
from interlace.train.checkpoint.storage import CheckpointError
from interlace.train.commands.export import export
from interlace.train.config.load import ConfigError, dumps, loads
from interlace.train.config.sections import Config
from interlace.train.models.build import build, build_layout, initialize, materialize, stored_weights
from interlace.train.models.tuning import rates, summary
from tests.distributed.workers import run_ranks
from tests.train.lanes import assert_same_bits, config_of, contents, curve, newest, same_curve, train, trainer_of

peft = pytest.importorskip("peft")

LORA = "train.lora={rank=3, alpha=6}"
SETTINGS = [LORA, "train.lr=0.02", "train.warmup_steps=0", "train.steps=4"]


def built(*overrides: str, **replace: Any) -> tuple[Config, Any]:
    config = config_of("one", *overrides, **replace)
    return config, build(config, ByteTokenizer(), source="tiny.toml")


def filled(*overrides: str, seed: int = 0) -> Any:
    """A model with random, non-zero adapters."""
    _, model = built(*overrides)
    materialize(model, seed=seed)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def text() -> Sample:
    ids = torch.randint(5, 60, (9,), generator=torch.Generator().manual_seed(1))
    return Sample(ids, torch.cat([ids[1:], torch.tensor([-100])]), {}, "text")


def plain_llm(model: Any) -> Any:
    """HuggingFace's own class with the weights of the language model without adapters."""
    config = copy.deepcopy(model.language_model.config)
    config._attn_implementation = "eager"
    whole = LlamaForCausalLM(config)
    state = model.language_model.state_dict()
    whole.load_state_dict({base_name(key): value for key, value in state.items() if not is_adapter(f".{key}")})
    return whole.eval()


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("['all-linear']", 14),
        ("['q_proj', 'v_proj']", 4),
        ("['language_model.*.layers.1.mlp']", 3),
        ("['vision']", 12),
        ("['vision*']", 12),
    ],
)
def test_targets(targets: str, count: int) -> None:
    _, model = built(f"train.lora={{rank=2, targets={targets}}}")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    made = [name for name in trained if is_adapter(name)]
    assert len(made) == 2 * count
    assert [name for name in trained if name not in made] == [
        name for name, _ in model.named_parameters() if name.startswith("encoders.vision.projector.")
    ]
    assert all(
        name.startswith(
            "encoders.vision.module." if "vision" in targets else ("language_model.", "encoders.vision.module")
        )
        for name in made
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lora.targets=['q_porj']"], r"\[train.lora\]: 'q_porj' matches nothing in the model; .*'q_proj'"),
        (["train.lora.targets=['embed_tokens']"], r"'embed_tokens' matches no linear layer"),
        (
            ["train.lora.targets=['vision.projector']"],
            r"'vision.projector' matches encoders.vision.projector.* of a fully trained projector",
        ),
        (["train.lora.targets=['lm_head']"], r"lm_head shares its weight with another layer"),
        (
            ["train.lora={modules_to_save=['q_proj']}"],
            r"'q_proj' in modules_to_save matches .*q_proj, which has an adapter",
        ),
        (
            ["train.lora.dropout=0.1", "parallel.language_model.cp=2"],
            r"dropout = 0.1: not supported with cp = 2 ranks of language_mod",
        ),
        (
            ["train.lora.dropout=0.1", "parallel.language_model={tp=2, cp=2}"],
            r"dropout = 0.1: not supported with tp = 2 and cp = 2 ranks of language_mod",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    parallel = {"placement": "parallel"}
    with pytest.raises(ConfigError, match=message):
        build(config_of("tp2", *overrides[:1], *overrides[1:], parallel=parallel), ByteTokenizer(), source="tiny.toml")


def test_base_weights_match_plain_and_new_adapters_are_no_op(tmp_path: Path) -> None:
    _, plain = built()
    _, model = built(LORA)
    materialize(plain, seed=3)
    materialize(model, seed=3)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            assert torch.equal(parameter, expected[base_name(name)]), name
        elif ".lora_B." in name:
            assert not parameter.any()
        else:
            assert 0.1 < parameter.abs().max() <= 3**0.5 * 2 / parameter.shape[1] ** 0.5
    batch = plain.collate([text()])
    assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)
    # And weights of a folder are loaded correctly, on any rank.
    plain.language_model.save_pretrained(tmp_path / "llm")
    config, again = built(LORA, f"model.language_model={{path={str(tmp_path / 'llm')!r}}}")
    parallel = parallelize(again, build_layout(config, again), timeout=60)
    initialize(parallel, seed=4, stored=stored_weights(config, again))
    held = dict(again.named_parameters())
    for name, parameter in model.language_model.named_parameters():
        same = torch.equal(held[f"language_model.{name}"], parameter)
        assert same != (".lora_A." in name), name  # drawn with another seed


@pytest.mark.parametrize(
    "options", ["rank=3, alpha=6", "rank=4, alpha=2, use_rslora=true, targets=['q_proj', 'down_proj']"]
)
def test_logits_and_gradients_are_pefts(options: str) -> None:
    model = filled(f"train.lora={{{options}}}")
    oracle = peft.get_peft_model(
        plain_llm(model),
        peft.LoraConfig(
            r=int(options[5]),
            lora_alpha=int(options.split("alpha=")[1][0]),
            use_rslora="rslora" in options,
            target_modules=["q_proj", "down_proj"] if "targets" in options else "all-linear",
        ),
    )
    ours = {name: p for name, p in model.language_model.named_parameters() if is_adapter(f".{name}")}
    theirs = {name.removeprefix("base_model.model."): p for name, p in oracle.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(ours[name])
    sample = text()
    output = model(**model.collate([sample]))
    logits = oracle(input_ids=sample.input_ids[None]).logits
    torch.testing.assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
    output.loss.backward()
    torch.nn.functional.cross_entropy(logits[0], sample.labels, ignore_index=-100).backward()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saved", ["", ", modules_to_save=['*.layers.1.input_layernorm', 'model.norm']"])
def test_peft_adapters_and_merged_weights_keep_the_logits(tmp_path: Path, saved: str) -> None:
    model = filled(f"train.lora={{rank=3, alpha=6{saved}}}")
    whole = plain_llm(filled(LORA))  # the base: parts trained beside adapters must come from the folder
    assert adapter_files(model, tmp_path / "adapter", base="base") == ["vision"]
    stored = load_file(tmp_path / "adapter" / "projector.safetensors")
    made = model.encoders["vision"].projector.state_dict()
    assert stored.keys() == {f"vision.{key}" for key in made}
    assert all(torch.equal(stored[f"vision.{key}"], value) for key, value in made.items())
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    sample = text()
    expected = model(**model.collate([sample])).logits
    torch.testing.assert_close(loaded(input_ids=sample.input_ids[None]).logits, expected, rtol=1e-5, atol=1e-5)
    _, plain = built()
    assert merge_adapters(model) == 14 and merge_adapters(model) == 0
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    torch.testing.assert_close(model(**model.collate([sample])).logits, expected, rtol=1e-5, atol=1e-5)
    merged = LlamaForCausalLM.from_pretrained(_saved(model, tmp_path / "merged"), attn_implementation="eager")
    torch.testing.assert_close(merged(input_ids=sample.input_ids[None]).logits, expected, rtol=1e-5, atol=1e-5)


def _saved(model: Any, folder: Path) -> Path:
    model.language_model.save_pretrained(folder)
    return folder


def test_what_a_folder_of_peft_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no layer of language_model has an adapter"):
        adapter_files(filled("train.lora={targets=['vision']}"), tmp_path)
    with pytest.raises(ValueError, match=r"embed_tokens.weight was trained and is tied to another weight"):
        adapter_files(filled(LORA, "train.train=['*embed_tokens*']"), tmp_path)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj was trained besides its adapter"):
        adapter_files(filled(LORA, "train.train=['language_model.*.layers.0.self_attn.q_proj']"), tmp_path)
    with pytest.raises(ValueError, match=r"encoders.vision.module.* was trained but is outside language_model"):
        adapter_files(filled("train.lora={targets=['all-linear', 'vision']}"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_adapter_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        adapter_files(filled(LORA), tmp_path / "adapter", base="base")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_for_weights_that_lie_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dumps(config_of("one", *SETTINGS)))
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir()
    options = SimpleNamespace(
        run=tmp_path / "run", folder=tmp_path / "out", step=None, adapter=True, set=[], check=None
    )
    with pytest.raises(ConfigError, match="lies nowhere: leave out --adapter"):
        export(options)  # type: ignore[arg-type]


def test_frozen_bits_stay_and_the_loss_falls(tmp_path: Path) -> None:
    config = config_of("one", *SETTINGS, "train.train=['language_model.model.norm']", "train.steps=12", "train.lr=0.05")
    assert loads(dumps(config)) == config
    trainer = trainer_of(config, tmp_path / "run")
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    moved = {name for name, parameter in trainer.parameters.items() if parameter.requires_grad}
    assert "language_model.model.norm.weight" in moved and any(map(is_adapter, moved))
    outcome = trainer.run()
    trainer.feed.close()
    changed = {name for name, parameter in trainer.parameters.items() if not torch.equal(parameter, before[name])}
    assert changed == moved
    losses = [line["loss_metrics/step_loss"] for line in curve(tmp_path / "run")]
    assert outcome["finished"] and sum(losses[-3:]) < sum(losses[:3]) - 0.3
    lines = summary(trainer.model, rates(config, trainer.model))
    assert any("parameters of language_model (LoRA): adamw" in line for line in lines)
    with pytest.raises(CheckpointError, match=r"lora.alpha is 6 in the checkpoint, 7 in the config"):
        again = trainer_of(config_of("one", *SETTINGS, "train.lora.alpha=7"), tmp_path / "run")
        again.resume()


def test_the_schedule_knows_what_lies_before_the_first_adapter() -> None:
    lora = "train.lora={targets=['language_model.*.layers.1.self_attn.q_proj']}"
    config, model = built(lora, "model.vision.freeze_projector=true")
    graph = stage_graph(model, build_layout(config, model))
    assert graph.trainable == {"vision": (False, False), "language_model": (False, True)}


CUTS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "placement": "shared",
        "vision": {"dp": 2, "shard": "full"},
        "language_model": {"dp": 2, "shard": "optimizer"},
    },
    "stages": {"placement": "parallel", "language_model": {"pp": 2}},
    "replicas": {"placement": "shared", "vision": {"pp": 2}, "language_model": {"dp": 2}},
    "full": {
        "placement": "shared",
        "vision": {"dp": 2, "shard": "full"},
        "language_model": {"dp": 2, "shard": "full"},
    },
    "lanes": {"placement": "shared", "vision": {"dp": 2, "shard": "optimizer"}, "language_model": {"tp": 2}},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(config_of("one", *SETTINGS), folder)
    return curve(folder)


@pytest.mark.parametrize(
    "cut",
    ["stages", "full", pytest.param("replicas", marks=pytest.mark.slow), pytest.param("lanes", marks=pytest.mark.slow)],
)
def test_layers_with_adapters_are_cut_like_others(tmp_path: Path, cut: str, alone: list[dict[str, float]]) -> None:
    train(config_of("tp2", *SETTINGS, parallel=CUTS[cut]), tmp_path)
    same_curve(curve(tmp_path), alone)


def from_folder(folder: Path) -> list[str]:
    """Makes a run read its language model from a folder."""
    return [*SETTINGS, "train.ema=0.9", f"model.language_model={{path={str(folder / 'llm')!r}}}"]


def on_two_ranks(rank: int, folder: str, cut: str) -> int:
    place = Path(folder)
    config = config_of("tp2", *from_folder(place), parallel=CUTS[cut])
    train(config, place / "whole")
    train(config, place / "parts", stop=2)
    train(config, place / "parts", resume=True)
    return train(config, place / "one", resume=True).step


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["full", "optimizer", "lanes"])
def test_two_ranks_resume_bit_for_bit_and_from_one_process(tmp_path: Path, cut: str) -> None:
    """With averaged weights, held as the weights are; weights of the folder are in no checkpoint."""
    materialize(built()[1], seed=1).language_model.save_pretrained(tmp_path / "llm")
    config = config_of("one", *from_folder(tmp_path))
    train(config, tmp_path / "alone")
    train(config, tmp_path / "one", stop=2)
    for kind, value in run_ranks(2, on_two_ranks, str(tmp_path), cut, timeout=240):
        assert (kind, value) == ("returned", 4), value
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert_same_bits(tmp_path / "parts", tmp_path / "whole")
    for name in ("whole", "one"):
        same_curve(curve(tmp_path / name), curve(tmp_path / "alone"))
    saved, here = contents(newest(tmp_path / "whole")), contents(newest(tmp_path / "alone"))
    again = trainer_of(config, tmp_path / "again")  # one process has the bits of the two ranks' pieces
    again.resume(newest(tmp_path / "whole"))
    again.feed.close()
    held = {
        name for name, tensor in again.parameters.items() if torch.equal(tensor, saved.get(f"model.{name}", tensor))
    }
    assert held == again.parameters.keys()
    left_out = {name for name in held if f"model.{name}" not in saved}
    assert left_out == {n for n in held if n.startswith("language_model.") and not is_adapter(n)}
    assert saved.keys() == here.keys() and any(key.startswith("optimizer.ema.") for key in here)
    for key, tensor in here.items():
        assert torch.allclose(saved[key], tensor, rtol=1e-3, atol=1e-5), key
