"""The config: refused values, the error messages, and the round trip through a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.train.config import load as config
from interlace.train.config.load import ConfigError, dumps, loads
from tests.train.config import BASE, _load


def test_defaults_and_overrides() -> None:
    loaded = _load("train.lr=1", "train.betas=[0.8, 0.9]", "run.name=other", "model.vision.freeze=true")
    assert loaded.train.lr == 1.0 and loaded.train.betas == [0.8, 0.9]
    assert loaded.run.name == "other" and loaded.model.encoders()["vision"].freeze
    assert _load("model.vision.config.hidden_size=64").model.encoders()["vision"].config == {"hidden_size": 64}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stesp=3", r"--set train.stesp=3: \[train\] has no key 'stesp'; did you mean 'steps'\?"),
        ("model.vison.freeze=true", r"\[model.vison\] says neither path .* did you mean \[model.vision\]\?"),
        ("model.vision.frieze=true", r"\[model.vision\] has no key 'frieze'; did you mean 'freeze'\?"),
        ("model.language_model.projector=mlp", r"\[model.language_model\] has no key 'projector'"),
        ("zzz=1", r"the top level has no key 'zzz'; valid: checkpoint, data, log"),
        ("train.steps=many", r"train.steps should be a valid integer, not the string 'many'"),
        ("train.steps='10'", r"train.steps should be a valid integer, not the string '10'"),
        ("train.steps=1.5", r"train.steps should be a valid integer, not the float 1.5"),
        ("train.steps=0", r"train.steps should be greater than 0"),
        ("train.lr=true", r"train.lr should be a valid number, not the boolean True"),
        (
            "train.activation_checkpointing=true",
            "activation_checkpointing should be 'none', 'full' or 'selective', not the boolean True",
        ),
        ("train.activation_checkpointing=selectiv", r"or 'selective', not .*; did you mean 'selective'\?"),
        ("train.betas=[0.5,2.0]", r"train.betas.1 should be less than 1"),
        ("model.vision.projector=liner", r"\[model.vision\]: there is no projector 'liner'; did you mean 'linear'\?"),
        ("model.vision.projector=magic", "there is no projector 'magic'; use linear, mlp, pixel_shuffle, qformer or"),
        ("model.vision.postprocess=drop_half", "model.vision.postprocess String should match pattern"),
        ("model.vision.std=[0.5, 0.0, 0.5]", r"std = \[0.5, 0.0, 0.5\] must be more than 0: pixels are divided by it"),
        ("model.vision.mean=[0.5]", "model.vision.mean List should have at least 3 items"),
        ("model.vsion=3", r"\[model\] has no key 'vsion'; did you mean"),
        ("model.text.architecture=ViTModel", "an encoder cannot be called 'text': take another name"),
        ("model.'my eyes'.architecture=ViTModel", "an encoder cannot be called .*my eyes.*: take another name"),
        ("model.ranks.architecture=ViTModel", r"cannot be called 'ranks', which is a key of \[parallel\]"),
        ("parallel.vison.pp=2", r"\[parallel.vison\] speaks of an encoder that .*; did you mean \[parallel.vision\]\?"),
        ("train.microbatches=9", "microbatches = 9 is more than batch_size = 8"),
        ("train.assign=entrian", r"train.assign should be .*; did you mean 'entrain'\?"),
        ("train.warmup_steps=101", "warmup_steps = 101 is more than steps = 100"),
        ("train.epochs=2", r"\[train\]: give steps or epochs, one of the two: there are both"),
        ("train.decay_steps=5", "decay_steps = 5 is of schedule = 'wsd', not of 'cosine'"),
        ("train.groups=[{pattern='*', lrr=1}]", r"\[train.groups\] has no key 'lrr'; did you mean 'lr'\?"),
        ("train.groups=[{pattern='*'}]", r"the group '\*' says neither lr nor weight_decay"),
        ("train.optimizer=adamW", r"there is no optimizer 'adamW'; did you mean 'adamw'\?"),
        ("train={steps=9, batch_size=8, optimizer='sgd', offload_optimizer=true}", "for adamw alone, not for 'sgd'"),
        ("train.early_stop.patience=0", "train.early_stop.patience should be greater than 0"),
        ("train.lora.rnk=4", r"\[train.lora\] has no key 'rnk'; did you mean 'rank'\?"),
        ("parallel.audio.pp=2", r"\[parallel.audio\] speaks of an encoder that \[model\] does not have"),
        ("parallel.ranks=5", "give 2 stages to place .*: use 1 to 2"),
        ("parallel.placement=chain", "placement 'chain' needs parallel.ranks"),
        ("parallel={placement='chain', ranks=2, vision={pp=2}}", r"ranges of equal cost.*remove parallel.vision.pp"),
        ("parallel.dp=9", "batch_size = 8 is too small .*on each of 9 replicas"),
        ("parallel={dp=3, language_model={dp=9}}", "batch_size = 8 is too small .*on each of 9 replicas"),
        (
            "parallel.vision={chunks=3, dp=3}",
            r"batch_size = 8 is too small for parallel.vision.chunks = 3 on each of 3 replicas of vision",
        ),
        ("parallel={vision={dp=9}}", "batch_size = 8 is too small for a chunk on each of 9 replicas of vision"),
        ("parallel.vision.chunks=0", "parallel.vision.chunks should be greater than 0"),
        ("parallel.language_model.chunks=2", r"\[parallel.language_model\] has no key 'chunks'"),
        (
            "parallel={ranks=2, vision={dp=2}}",
            r"needs one dp for all modules .*got vision: dp=2 .*: leave ranks out",
        ),
        (
            "parallel={placement='replicated', vision={dp=2}}",
            "replicated encoders .*needs one dp for all.*vision: dp=2",
        ),
        ("parallel={placement='chain', ranks=2, vision={dp=2}}", r"ranges of equal cost.*remove parallel.vision.dp$"),
        (
            "parallel={placement='shared', vision={dp=2}}",
            r"tp \* cp \* pp \* dp must be equal for all; got vision: 2, language_model: 1",
        ),
        (
            "parallel={placement='shared', language_model={tp=2}}",
            r"tp \* cp \* pp \* dp must be equal for all; got vision: 1, language_model: 2",
        ),
        ("parallel={placement='shared', ranks=1}", r"takes its ranks from the degrees; remove parallel.ranks"),
        ("parallel.language_model.order='v'", r"parallel.language_model\]: order = 'v' needs virtual = 2, got 1"),
        (
            "parallel.schedule='zb_v'",
            r"schedule = 'zb_v' is for a module with virtual = 2 and order = 'v': give \[para",
        ),
        ("parallel={schedule='interleaved', placement='parallel'}", "for a module with virtual = 2 or more: give"),
        (
            "parallel={placement='chain', ranks=2, language_model={virtual=2}}",
            r"ranges of equal cost.*remove parallel.language_model.virtual$",
        ),
        ("parallel={placement='replicated', vision={virtual=2}}", "set its pp and virtual to 1, not 2 stages"),
        ("parallel.activation_memory=0", "parallel.activation_memory should be greater than 0"),
        ("parallel.language_model.tp=0", "parallel.language_model.tp should be greater than 0"),
        (
            "parallel={placement='chain', ranks=2, vision={tp=2}, language_model={shard='full'}}",
            r"ranges of equal cost.*remove parallel.vision.tp, parallel.language_model.shard$",
        ),
        (
            "parallel={placement='replicated', language_model={cp=2}}",
            r"replicated encoders run on every rank of .* tp = cp = 1; got .*language_model: dp=1 tp=1 cp=2",
        ),
        (
            "parallel={ranks=1, language_model={tp=2}}",
            r"ranks = 1 .*and tp = cp = 1; got .*language_model: dp=1 tp=2 cp=1: leave ranks out",
        ),
        ("parallel.vision.shard='ful'", r"parallel.vision.shard should be .*, not the string 'ful'; .*mean 'full'\?"),
        ("parallel.language_model.shard_ranks=2", r"\[parallel.language_model\]: shard_ranks = 2 .*leave shard_ranks"),
        (
            "parallel.vision={shard='full', dp=2, shard_ranks=1}",
            r"parallel.vision\]: shard_ranks = 1 .*shard_ranks >= 2",
        ),
        (
            "parallel.vision={shard='full', dp=4, shard_ranks=3}",
            "parallel.vision.shard_ranks = 3, but 4 ranks hold the same weights of vision: give a number that divides",
        ),
        ("run=3", "run must be a section"),
        ("train.steps.more=2", "train.steps is a value, not a section"),
        ("train", "write it as section.key=value"),
        ("run.name='a b'", "run.name String should match pattern"),
    ],
)
def test_refusals(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data={dataset='chats', train=['a.jsonl'], pack=true, max_tokens=64}", "with data.pack they are the rows"),
        ("parallel.vision.chunks=2", r"'entrain' says itself what the encoders' chunks are: leave out parallel.vision"),
        ("parallel.placement='shared'", "with parallel.placement = 'shared' encoders run all samples first"),
    ],
)
def test_deferral_needs_microbatches_of_samples(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load("train={steps=9, batch_size=8, microbatches=8, assign='entrain'}", override)


def test_state_is_not_moved_to_the_host_where_it_is() -> None:
    """The value of "auto" is known only on the machine."""
    assert _load("train.offload_optimizer=true").run.device == "auto"
    with pytest.raises(ConfigError, match=r"offload_optimizer = true moves .* with run.device = 'cpu' .*leave the key"):
        _load("train.offload_optimizer=true", "run.device=cpu")


def test_errors_name_the_file_the_section_and_the_meaning() -> None:
    table = copy.deepcopy(BASE)
    del table["train"]["batch_size"]
    del table["run"]
    with pytest.raises(ConfigError) as error:
        config.from_table(table, source="tiny.toml")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("tiny.toml: the top level misses the key 'run' (")
    assert lines[1] == (
        "tiny.toml: [train] misses the key 'batch_size' (Samples per step, over all microbatches of all replicas)"
    )


def test_placement_sets_world_size_and_checks_colocated_specs() -> None:
    model = BASE["model"] | {"audio": {"architecture": "WhisperEncoder"}}
    assert _load("parallel.placement=colocated", model=model).world_size() == 2
    assert _load("parallel.placement=parallel", model=model).world_size() == 3
    assert _load("parallel.placement=replicated", "parallel.language_model.pp=3", model=model).world_size() == 3
    assert _load("parallel.vision.pp=2", "parallel.audio.pp=2", model=model).world_size() == 3
    assert _load("parallel.ranks=1", model=model).world_size() == 1
    assert _load("parallel={placement='colocated', dp=2}", model=model).world_size() == 4
    with pytest.raises(ConfigError, match="need one dp; got vision: dp=2, audio: dp=1: make them equal"):
        _load("parallel.vision.dp=2", model=model)
    with pytest.raises(ConfigError, match="need one pp"):
        _load("parallel.vision.pp=2", model=model)
    with pytest.raises(ConfigError, match="need one virtual"):
        _load("parallel.vision.virtual=2", model=model)
    v = "{pp=2, virtual=2, order='v'}"
    virtual = _load(f"parallel={{placement='parallel', schedule='zb_v', language_model={v}}}", model=model)
    assert virtual.world_size() == 4
    with pytest.raises(ConfigError, match="runs all of 'vision' on every language model rank"):
        _load("parallel.vision.pp=2", "parallel.placement=replicated", model=model)


def test_compile_is_refused_for_schedules_that_split_backward() -> None:
    """Their weights' gradients come with the first half; an open plan is restricted to the schedules that the config
    allows.
    """
    v = "language_model={virtual=2, order='v'}"
    splitting = {"zb_h1": "dp=1", "zb_h2": "dp=1", "auto": "dp=1", "zb_v": v}
    for name, more in splitting.items():
        overrides = f"parallel={{placement='parallel', schedule='{name}', {more}}}"
        assert _load(overrides).parallel.schedule == name
        message = (
            rf"schedule = '{name}' puts the gradients of weights off .*, which layers that are compiled .* cannot do"
        )
        with pytest.raises(
            ConfigError, match=message + ".*: set parallel.schedule to '1f1b' or 'gpipe' or 'interleaved'"
        ):
            _load("train.compile=true", overrides)
    assert _load("train.compile=true").train.compile
    assert _load("train.compile=true", "parallel={layout='auto'}").parallel.auto


def test_modules_have_replicas_of_their_own() -> None:
    model = BASE["model"] | {"audio": {"architecture": "WhisperEncoder"}}
    unequal = _load(
        "parallel={placement='parallel', dp=2, vision={dp=4, pp=2}, language_model={pp=3, dp=1}}", model=model
    )
    assert {name: unequal.parallel.replicas(name) for name in unequal.modules()} == {
        "vision": 4,
        "audio": 2,
        "language_model": 1,
    }
    assert unequal.world_size() == 4 * 2 + 2 * 1 + 1 * 3 and not unequal.uniform()
    colocated = _load("parallel={dp=2, language_model={dp=4, pp=2}}", model=model)
    assert colocated.world_size() == 2 * 1 + 4 * 2
    shared = "parallel={placement='shared', vision={dp=4}, audio={pp=2, dp=2}, language_model={pp=4}}"
    assert _load(shared, model=model).world_size() == 4
    assert _load("parallel={placement='shared', dp=3}", model=model).world_size() == 3
    assert _load("train.batch_size=7", "parallel={dp=3}", "train.microbatches=2").world_size() == 3  # not divisible


def test_a_replica_is_one_process_until_a_module_is_spread() -> None:
    model = BASE["model"] | {"audio": {"architecture": "WhisperEncoder"}}
    for parallel, ranks in [
        ("{}", 1),
        ("{dp=3}", 3),
        ("{vision={shard='optimizer'}, dp=2}", 2),
        ("{language_model={pp=2}}", 3),
        ("{vision={tp=2}, audio={tp=2}}", 3),
        ("{language_model={dp=2}}", 3),
    ]:
        loaded = _load(f"parallel={parallel}", model=model)
        assert loaded.world_size() == ranks, parallel
        assert loads(dumps(loaded)) == loaded  # open keys stay open in a run folder


def test_ranks_of_lanes_are_counted() -> None:
    model = BASE["model"] | {"audio": {"architecture": "WhisperEncoder"}}
    specs = "dp=2, vision={tp=2}, language_model={tp=3, pp=2, cp=2}"
    loaded = _load(f"parallel={{placement='parallel', {specs}}}", model=model)
    assert loaded.world_size() == 2 * 2 + 2 * 1 + 2 * 12
    assert loaded.parallel.degrees("language_model") == "tp = 3, cp = 2, pp = 2, dp = 2"
    assert loaded.parallel.degrees("audio") == "pp = 1, dp = 2"
    with pytest.raises(ConfigError, match="need one tp; got vision: tp=2, audio: tp=1: make"):
        _load(f"parallel={{{specs}}}", model=model)
    assert _load(f"parallel={{{specs}, audio={{tp=2}}}}", model=model).world_size() == 2 * 2 + 2 * 12
    shared = "parallel={placement='shared', dp=4, language_model={tp=2, dp=2}}"
    assert _load(shared, model=model).world_size() == 4


def test_chunks_are_those_that_encoders_name() -> None:
    model = BASE["model"] | {"audio": {"architecture": "WhisperEncoder"}}
    assert _load("parallel.vision.chunks=3", model=model).chunks() == {"vision": 3}
    assert _load("parallel.placement=shared", model=model).chunks() == {}


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read the config: No such file"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\nname = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML: .*line 1"):
        config.load(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        config.load(tmp_path / "bytes.toml")


_VALUES = st.recursive(
    st.none().map(lambda _: True) | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    extra=st.dictionaries(st.text(max_size=6), _VALUES, max_size=4),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True, alphabet="aZ0._-"),
)
def test_written_config_reads_back_equal(extra: dict[str, Any], name: str, tmp_path_factory: Any) -> None:
    table = copy.deepcopy(BASE)
    table["run"]["name"] = name
    table["model"]["language_model"]["config"] = extra
    loaded = config.from_table(table)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.dumps(loaded), encoding="utf-8")
    assert config.load(path) == loaded


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert config.load(path).run.name
