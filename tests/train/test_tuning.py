"""Trained parts of a config and their learning rates: patterns, groups, schedules, epochs, optimizers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interlace.data import ByteTokenizer
from interlace.run import stage_graph
from interlace.train.config.load import ConfigError, dumps, loads
from interlace.train.config.sections import Config
from interlace.train.config.train import Train
from interlace.train.data.feed import Feed, datasets
from interlace.train.job import with_steps
from interlace.train.models.build import build, build_layout, materialize
from interlace.train.models.tuning import Rates, rates, summary
from interlace.train.optim import Optimizer, lr_factor
from tests.train.lanes import config_of, curve, same_curve, train
from tests.train.one_process import ToyModel, toy_config, toy_feed


def model_of(config: Config) -> Any:
    return build(config, ByteTokenizer(), source="tiny.toml")


def trained(*overrides: str) -> set[str]:
    model = model_of(config_of("one", *overrides))
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


TOWER, PROJECTOR = "encoders.vision.module.", "encoders.vision.projector."


@pytest.mark.parametrize(
    ("overrides", "is_trained"),
    [
        (["train.freeze=['vision']"], lambda name: not name.startswith(TOWER)),
        (["train.freeze=['vision.*']"], lambda name: not name.startswith("encoders.vision.")),
        (["train.freeze=['vision.*']", "train.train=['*.projector.*']"], lambda name: not name.startswith(TOWER)),
        (["train.freeze=['*']", "train.train=['vision.projector']"], lambda name: name.startswith(PROJECTOR)),
        (
            ["train.freeze=['language_model', 'vision']", "train.train=['*.layers.1']"],
            lambda name: ".layers.1." in name or name.startswith(PROJECTOR),
        ),
        (["train.freeze=['*norm*']"], lambda name: "norm" not in name),
        (["train.freeze=['language_model.model.layers.0']"], lambda name: "language_model.model.layers.0." not in name),
        (
            ["model.vision.freeze=true", "train.train=['vision.*.layers.1.*']"],
            lambda name: ".layers.1." in name or not name.startswith(TOWER),
        ),
        (["train.freeze=['language_model.lm_head']"], lambda name: "embed_tokens" not in name),  # tied: one weight
    ],
)
def test_patterns_choose_what_is_trained(overrides: list[str], is_trained: Any) -> None:
    names = {name for name, _ in model_of(config_of("one")).named_parameters()}
    assert trained(*overrides) == {name for name in names if is_trained(name)}


def test_only_fully_frozen_modules_stay_in_eval_mode() -> None:
    model = model_of(
        config_of("one", "train.freeze=['*']", "train.train=['language_model.*.layers.1.self_attn.q_proj']")
    )
    model.train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert not modes["encoders.vision"] and not modes["language_model.model.layers.0"]
    assert not modes["language_model.model.layers.1.mlp.act_fn"]
    assert modes["language_model.model.layers.1.self_attn"] and modes["language_model.model.layers.1.self_attn.q_proj"]
    assert not modes["language_model.model.layers.1.self_attn.k_proj"]


def test_the_schedule_sees_what_patterns_freeze() -> None:
    config = config_of("one", "train.freeze=['vision', 'language_model.*.layers.0', '*embed*', '*norm*']")
    model = model_of(config)
    graph = stage_graph(model, build_layout(config, model))
    assert graph.trainable == {
        "vision": (False, True),
        "language_model": (False, True),
    }  # the projector; mlp, attention


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.freeze=['vison']"], r"\[train\] freeze: 'vison' matches nothing in the model; the nearest .*'vision'"),
        (["train.train=['*.projektor.*']"], r"\[train\] train: '\*.projektor.\*' matches nothing.*'vision.projector'"),
        (["train.freeze=['*']"], r"freeze all parameters"),
        (
            ["train.freeze=['*.lora_A*']", "train.lora={}"],
            r"freeze: '\*.lora_A\*' matches only adapters, .* from train.lora",
        ),
        (["train.groups=[{pattern='*.layres.*', lr=1}]"], r"groups: '\*.layres.\*' matches nothing.*layers"),
        (
            ["train.groups=[{pattern='vision', lr=1}]", "model.vision.freeze=true"],
            r"groups: all matches of 'vision' are frozen; remove it",
        ),
        (
            ["train.groups=[{pattern='*', lr=1}, {pattern='*norm*', weight_decay=1}]"],
            r"all matches of '\*norm\*' are frozen or in a group before it",
        ),
    ],
)
def test_a_pattern_without_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(config_of("one", *overrides))


def test_first_matching_group_overrides_module_rates() -> None:
    groups = "train.groups=[{pattern='*.layers.1.*', lr=0.5}, {pattern='*norm*', weight_decay=0.25}]"
    config = config_of("one", groups, "model.language_model.lr=0.125", "model.vision.projector_lr=0.75", "train.lr=1.5")
    model = model_of(config)
    result = rates(config, model)
    decay = config.train.weight_decay
    assert result["language_model.model.layers.1.input_layernorm.weight"] == Rates("*.layers.1.*", "adamw", 0.5, decay)
    assert result["language_model.model.norm.weight"] == Rates("*norm*", "adamw", 0.125, 0.25)
    assert result["language_model.model.embed_tokens.weight"] == Rates("language_model", "adamw", 0.125, decay)
    lines = summary(model, result)
    assert lines[-1] == f"0 of {sum(p.numel() for p in model.parameters()):,} parameters are frozen"
    assert any(line.endswith("parameters of vision.projector: adamw, lr 0.75, weight decay 0.05") for line in lines)
    assert loads(dumps(config)) == config  # groups survive the run folder's config.toml


def test_the_configs_of_the_page_are_configs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    beside = dumps(config_of("one")).partition("[train]")[0]
    assert len(blocks) == 3
    for block in blocks:
        assert loads(beside + block, source="fine-tuning.md").train.batch_size >= 32


# ---------------------------------------------------------------------- schedules


def test_schedules() -> None:
    def factors(*overrides: str) -> list[float]:
        settings = toy_config("train.steps=50", "train.warmup_steps=10", "train.min_lr_ratio=0.2", *overrides).train
        return [lr_factor(step, settings) for step in range(1, 61)]

    linear, constant = factors("train.schedule=linear"), factors("train.schedule=constant")
    wsd, short = factors("train.schedule=wsd", "train.decay_steps=20"), factors("train.schedule=wsd")
    for each in (linear, constant, wsd, short):
        assert each[:10] == [step / 10 for step in range(1, 11)]
    assert linear[29] == pytest.approx(0.6) and linear[49:] == [pytest.approx(0.2)] * 11
    assert constant[10:] == [1.0] * 50
    assert wsd[10:30] == [1.0] * 20 and wsd[39] == pytest.approx(0.6) and wsd[49:] == [pytest.approx(0.2)] * 11
    assert short[10:45] == [1.0] * 35 and short[46] < 0.7 and short[49] == pytest.approx(0.2)  # a tenth: 5 steps
    cosine = factors()
    assert cosine[29] == pytest.approx(0.6) and cosine[19] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))


def test_a_short_run_warms_up_in_a_tenth_of_it() -> None:
    def steps_below_the_peak(**settings: int) -> int:
        train = Train(batch_size=2, schedule="constant", **settings)
        return sum(lr_factor(step, train) < 1.0 for step in range(1, train.last_step + 1))

    assert steps_below_the_peak(steps=300) == 19 and steps_below_the_peak(steps=60) == 5
    assert Train(batch_size=2, schedule="wsd", steps=100, decay_steps=91).warmup_of(100) == 9  # the rest of 10
    assert steps_below_the_peak(steps=60, schedule_steps=40) == 3 and steps_below_the_peak(steps=9) == 0


def test_epochs_become_steps_of_whole_batches() -> None:
    config = toy_config("train={epochs=2.5, batch_size=4, warmup_steps=3}")
    with pytest.raises(ValueError, match="epochs become steps when the length of the data is known"):
        _ = config.train.last_step
    made = with_steps(config, [5, 6, 4].__getitem__)  # the number of packed rows differs between epochs
    assert made.train.last_step == 13 and made.train.epochs is None
    assert loads(dumps(made)) == made
    with pytest.raises(ConfigError, match=r"epochs = 2.5 of this data make steps = 2: warmup_steps = 3 is more than"):
        with_steps(config, lambda _: 1)
    profiled = toy_config("train={epochs=2.5, batch_size=4, warmup_steps=3}", "log.profile={start=14}")
    with pytest.raises(ConfigError, match=r"make steps = 13: log.profile.start = 14, but the run has 13 steps"):
        with_steps(profiled, [5, 6, 4].__getitem__)
    assert with_steps(toy_config(), lambda _: 5) == toy_config()


# ---------------------------------------------------------------------- optimizers


class Mixed(ToyModel):
    """A model with a weight of three dimensions, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model["cube"] = nn.Conv1d(2, 3, 2)
        self.language_model["unused"] = nn.Linear(4, 3)

    def loss_sum(self, sample: Any) -> torch.Tensor:
        ones = torch.ones(1, 2, 3) + len(sample.input_ids)
        return super().loss_sum(sample) + self.language_model["cube"](ones).square().sum()


def reference(kind: str, model: Any) -> list[torch.optim.Optimizer]:
    """torch's own, with groups written out by hand."""
    named = dict(model.named_parameters())

    def groups(names: list[str]) -> list[dict[str, Any]]:
        several = [named[n] for n in names if named[n].dim() > 1]
        vectors = [named[n] for n in names if named[n].dim() < 2]
        return [{"params": several, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]

    linear = ["language_model.mix.weight", "language_model.unused.weight"]
    rest = [name for name in named if name not in linear]
    if kind == "sgd":
        return [torch.optim.SGD(groups([*named]), momentum=0.8)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(groups([*named]))]
    if kind == "adamw":
        return [torch.optim.AdamW(groups([*named]), betas=(0.9, 0.95), fused=True)]
    muon = torch.optim.Muon(groups(linear)[:1], momentum=0.8, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups(rest), betas=(0.9, 0.95), fused=True)]


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "sgd"])
def test_optimizers_and_saved_state_match_torch_bit_for_bit(kind: str) -> None:
    config = toy_config("train.weight_decay=0.3", f"train.optimizer={kind}", "train.momentum=0.8", "train.steps=3")
    ours, theirs, later = Mixed(), Mixed(), Mixed()
    for model in (theirs, later):
        model.load_state_dict(ours.state_dict())
    optimizer, plain = Optimizer(ours.named_parameters(), config, rates(config, ours)), reference(kind, theirs)
    resumed = Optimizer(later.named_parameters(), config, rates(config, later))
    sample = toy_feed(config).next().samples[0]
    for step in (1, 2, 3):
        for model in (ours, theirs):
            model.eval().loss_sum(sample).backward()
        optimizer.step(step)
        for each in plain:
            for group in each.param_groups:
                group["lr"] = 1e-2 * step / 3
            each.step()
            each.zero_grad()
        if step == 2:
            later.load_state_dict(ours.state_dict())
            for name, tensor in resumed.state().items():
                tensor.copy_(optimizer.state()[name])
    later.eval().loss_sum(sample).backward()
    resumed.step(3)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, dict(theirs.named_parameters())[name]), name
        assert torch.equal(parameter, dict(later.named_parameters())[name]), name
    assert all(torch.equal(tensor, optimizer.state()[name]) for name, tensor in resumed.state().items())


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
@pytest.mark.parametrize("layout", ["tp2", "sharded"])
def test_what_needs_whole_matrices_is_refused_pieces(kind: str, layout: str) -> None:
    key = "tp = 2" if layout == "tp2" else "shard|tp"
    with pytest.raises(ConfigError, match=f"optimizer = '{kind}' needs whole matrices.*({key})"):
        model_of(config_of(layout, f"train.optimizer={kind}"))
    frozen = ["train.freeze=['language_model', 'vision.*']", "train.train=['*.lm_head']"]
    placed = {"placement": "parallel", "vision": {"tp": 2}}
    assert model_of(config_of("tp2", f"train.optimizer={kind}", *frozen, parallel=placed))


def plain_losses(config: Config, make: Any) -> list[float]:
    """A loop in plain PyTorch: the whole batch at once, with clipping of the global norm."""
    tokenizer = ByteTokenizer()
    model = materialize(build(config, tokenizer), seed=config.run.seed)
    data = datasets(config, model, tokenizer)[:2]
    feed = Feed(*data, batch_size=config.train.batch_size, seed=config.run.seed, validation_samples=1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(model)
    losses = []
    with feed.loader:
        for step in range(1, config.train.last_step + 1):
            model.train()
            loss = model(**model.collate(feed.next().samples)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * lr_factor(step, config.train)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_groups_and_freezing_match_a_plain_loop(tmp_path: Path) -> None:
    """Layers with their own rates, a frozen encoder, linear decay; then the same over two ranks."""
    settings = [
        "train.freeze=['vision', '*embed*']",
        "train.schedule=linear",
        "train.optimizer=sgd",
        "train.momentum=0.9",
    ]
    settings += ["train.groups=[{pattern='language_model.*.layers.0', lr=0.2, weight_decay=0.0}]", "train.lr=0.05"]
    config = config_of("one", *settings)

    def make(model: Any) -> torch.optim.Optimizer:
        first = [p for n, p in model.named_parameters() if ".layers.0." in n and p.requires_grad]
        named = [p for n, p in model.named_parameters() if ".layers.0." not in n and p.requires_grad]
        several, vectors = [p for p in named if p.dim() > 1], [p for p in named if p.dim() < 2]
        groups = [{"params": first, "peak": 0.2, "weight_decay": 0.0}]
        groups += [{"params": several, "peak": 0.05, "weight_decay": 0.05}]
        groups += [{"params": vectors, "peak": 0.05, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, momentum=0.9)

    expected = plain_losses(config, make)
    shared = {"placement": "shared", "vision": {"dp": 2}, "language_model": {"pp": 2}}
    runs = {"one": config}
    runs["two"] = config_of("tp2", *settings, parallel={"placement": "parallel"})
    runs["shared"] = config_of("tp2", *settings, parallel=shared)
    for name, each in runs.items():
        whole = train(each, tmp_path / name)
        losses = [line["loss_metrics/step_loss"] for line in curve(tmp_path / name)]
        assert losses == pytest.approx(expected, rel=1e-6), name
        assert whole.parallel.layout.world == (1 if name == "one" else 2)
    same_curve(curve(tmp_path / "two"), curve(tmp_path / "one"))
