"""layout.toml: one file, one config; and the ways in which a config leaves its layout open."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.train.auto import agree, layout_file, report
from interlace.train.auto.candidates import Candidate, with_tables
from interlace.train.auto.choose import Decision, decide
from interlace.train.auto.resolve import check_fits, resolve_config, worlds_up_to
from interlace.train.config.load import Config, ConfigError, dumps, load, loads
from tests.cli import TINY
from tests.train.auto import oracle
from tests.train.config import _load


def asked(layers: tuple[int, int] = (2, 2), batch: int = 8, **parallel: Any) -> Config:
    return oracle.config_of(layers, batch=batch, schedule="1f1b", **parallel)


@cache
def decided() -> tuple[Config, Decision, str]:
    config = asked()
    model = oracle.model_of(config)
    machine = oracle.machine_of(config, model, latency=1e-6, bandwidth=1e10)
    decision = decide(config, model, oracle.work_of(model), machine, [2])
    return config, decision, layout_file.text_of(config, decision, machine.origin, "random samples")


def test_a_layout_file_repeats_the_choice() -> None:
    from interlace.train.models.build import build_layout

    config, decision, text = decided()
    one, two = (
        layout_file.with_layout(config, text, "layout.toml"),
        layout_file.with_layout(config, text, "layout.toml"),
    )
    assert one == two and not one.parallel.auto and one.world_size() == 2
    best = decision.best.candidate
    assert (one.parallel.placed, one.parallel.schedule) == (best.placement, best.schedule)
    assert one.train.microbatches == best.microbatches
    model = oracle.model_of(config)
    assert build_layout(one, model) == build_layout(two, model)
    assert loads(dumps(one)) == one  # what the run folder's config.toml has
    table = layout_file.table_of(text)
    assert table["predicted"]["seconds"] == decision.best.seconds
    assert table["reasons"]["candidates"] == decision.considered and table["runners_up"]["1"]["seconds"] > 0


def test_files_of_other_configs_and_broken_ones_are_refused() -> None:
    config, _, text = decided()
    with pytest.raises(
        ConfigError, match=r"layout.toml was chosen for another config, with other settings of model.vision"
    ):
        layout_file.with_layout(asked((3, 2)), text, "layout.toml")
    with pytest.raises(ConfigError, match=r"other settings of parallel\.placement:"):
        layout_file.with_layout(asked(placement="shared"), text, "layout.toml")
    earlier = text.replace("asked_keys", "unread")  # a file without digests of keys
    for file, name in ((text, "train.batch_size"), (earlier, r"\[train\]")):
        with pytest.raises(ConfigError, match=f"other settings of {name}:"):
            layout_file.with_layout(asked(batch=16), file, "layout.toml")
    for broken in ("", "version = 1", "version = 9\n" + text.split("\n", 3)[3], text[: len(text) // 6] + "="):
        with pytest.raises(ConfigError, match=r"layout.toml: invalid layout file: "):
            layout_file.with_layout(config, broken, "layout.toml")
    other = text.replace('placement = "', 'placement = "x')
    with pytest.raises(ConfigError, match=r"layout\.toml: invalid layout file: .*placement"):
        layout_file.with_layout(config, other, "layout.toml")
    with pytest.raises(
        ConfigError, match=r"layout\.toml: \[parallel\] has no key 'placment'; did you mean 'placement'"
    ):
        layout_file.with_layout(config, text.replace("placement =", "placment ="), "layout.toml")
    with pytest.raises(ConfigError, match=r"layout\.toml: invalid layout file: it has no section \[chosen\]"):
        layout_file.with_layout(config, text.replace("[chosen.", "[other."), "layout.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the layout: No such file"),
        ("version = 1", "invalid layout file: it has no section [asked]"),
        ("version = 1\n[asked]\n[chosen.parallel]\n[chosen.train]", "chosen for another config, with other settings"),
        (
            "version = 1\n[asked]\n[chosen.parallel]\n[chosen.train]\n[asked_keys]\ndata = 3",
            "other settings of [model],",
        ),
    ],
)
def test_a_refused_file_makes_no_run_folder(
    text: str | None, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "tiny.toml", tmp_path / "layout.toml"
    path.write_text(TINY.format(folder=tmp_path))
    if text is not None:
        file.write_text(text)
    assert main(["train", str(path), "--set", "parallel=auto", "--layout", str(file)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and str(file) in err and words in err
    assert not (tmp_path / "tiny").exists()
    assert main(["train", str(path), "--layout", str(file)]) == 2
    assert "fixes its own layout" in capfd.readouterr().err


def test_a_layout_that_cannot_cut_the_model_names_its_file() -> None:
    config = oracle.config_of((2, 2), batch=8, schedule="1f1b")
    parts = {"placement": "parallel", "dp": 1, "language_model": {"pp": 64}}
    with pytest.raises(ConfigError, match=r"^layout\.toml: "):
        check_fits(with_tables(config, parts, {}), Path("layout.toml"))


def test_what_else_a_choice_depends_on_is_part_of_the_file() -> None:
    config, decision, _ = decided()
    best = replace(decision.best, candidate=replace(decision.best.candidate, threads=3))
    text = layout_file.text_of(config, replace(decision, best=best), "", "")
    assert layout_file.with_layout(config, text, "layout.toml").parallel.threads == 3
    with pytest.raises(ConfigError, match=r"other settings of parallel\.threads:"):
        layout_file.with_layout(asked(threads=1), text, "layout.toml")
    other = config.model_copy(update={"train": config.train.model_copy(update={"assign": "entrain"})})
    with pytest.raises(ConfigError, match=r"other settings of train\.assign:"):
        layout_file.with_layout(other, text, "layout.toml")


def test_a_rank_of_torchrun_takes_the_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.train import rank

    path, given = tmp_path / "tiny.toml", dict[str, Any]()
    path.write_text(TINY.format(folder=tmp_path))
    monkeypatch.setattr(rank, "run", lambda config, **keys: given.update(keys) or 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("INTERLACE_RUN_FOLDER", raising=False)
    assert main(["train", str(path), "--set", "parallel=auto", "--layout", str(tmp_path / "layout.toml")]) == 0
    assert given["start"].layout_file == tmp_path / "layout.toml"


class _Alone:
    """Replaces a start-up with this rank; records its messages to the other ranks."""

    world = 2

    def __init__(self, rank: int, heard: Any = None) -> None:
        self.rank, self.heard, self.told = rank, heard, None

    def gather(self, what: str, value: Any) -> list[Any]:
        self.told = value
        return [value if self.heard is None else self.heard]


def test_failed_reads_and_choices_reach_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _, text = decided()
    first = _Alone(0)
    with pytest.raises(ConfigError, match="gone: cannot read the layout"):
        agree.agree(config, first, source="x", given=tmp_path / "gone", resume=None)
    for said in (first.told, ["no TOML at all [", "layout.toml", ""]):
        with pytest.raises(ConfigError, match=r"gone: cannot read|layout.toml: invalid layout file"):
            agree.agree(config, _Alone(1, said), source="x", given=None, resume=None)
    settled, _ = agree.agree(config, _Alone(1, [text, "layout.toml", ""]), source="x", given=None, resume=None)
    assert settled.world_size() == 2

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(agree, "_layout", fails)
    with pytest.raises(RuntimeError):
        agree.agree(config, first, source="x", given=None, resume=None)
    assert first.told is not None and "RuntimeError: out of memory" in first.told[2]


def test_a_run_folder_gets_the_file_and_goes_on_with_it(tmp_path: Path) -> None:
    config, _, text = decided()
    (tmp_path / "given").write_text(text)
    lines: list[str] = []
    run = tmp_path / "run"
    run.mkdir()
    one = resolve_config(config, source="tiny.toml", folder=run, given=tmp_path / "given", say=lines.append)
    assert (run / "layout.toml").read_text() == text and "2 ranks" in lines[0]
    assert resolve_config(config, source="tiny.toml", folder=run, given=None, say=lines.append) == one
    with pytest.raises(ConfigError, match="gone: cannot read the layout"):
        resolve_config(config, source="tiny.toml", folder=run, given=tmp_path / "gone", say=lines.append)


def test_run_folders_of_earlier_versions_go_on_and_new_configs_are_refused(tmp_path: Path) -> None:
    config, _, text = decided()
    old = dumps(config).replace('layout = "auto"', 'plan = "auto"')
    path = tmp_path / "config.toml"
    path.write_text(old)
    with pytest.raises(ConfigError, match=r"config\.toml: parallel\.plan is now: parallel\.layout"):
        load(path)
    with pytest.raises(ConfigError, match=r"--set parallel\.plan=auto: parallel\.plan is now: parallel\.layout"):
        _load("parallel.plan=auto")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "plan.lock").write_text(text)
    assert load(path) == config
    settled = resolve_config(load(path), source=str(path), folder=tmp_path, given=None, say=print)
    assert settled.world_size() == 2 and (tmp_path / "layout.toml").read_text() == text
    before = {"plan": "auto", "choose": [], "schedule": "1f1b"}  # the section whose digest an earlier version stored
    assert layout_file.digests(config)["parallel"] == layout_file.digest_of(before)


def test_reasons_against_other_candidates() -> None:
    _, decision, _ = decided()
    best = decision.best
    parts = {"compute": 0.5, "communication": 0.1, "bubble": 0.4}
    best = replace(best, seconds=1.0, **parts)

    def reason(candidate: Candidate = best.candidate, **times: float) -> str:
        other = replace(best, **{"candidate": candidate, **times})
        return report.lines(replace(decision, best=best, outcomes=(best, other)), "", "")[-3]

    assert reason(seconds=1.2, communication=0.3).endswith("; 20.0 % slower, from 200.0 ms more communication")
    assert reason(seconds=1.2, bubble=0.6).endswith("; 20.0 % slower, from 200.0 ms more bubble")
    full = replace(best.candidate, checkpointing="full")
    assert reason(full, seconds=1.0001).endswith("; as fast, but with more settings")
    specs = tuple((name, replace(spec, dp=4)) for name, spec in best.candidate.specs)
    more = replace(best.candidate, specs=specs)
    added = more.world - best.candidate.world
    assert added > 0 and reason(more, seconds=0.99).endswith(f"; 1.0 % faster, too little for {added} more ranks")


def test_why_in_words_and_as_a_picture(tmp_path: Path) -> None:
    _, decision, _ = decided()
    lines = report.lines(decision, "origin", "data")
    assert "ms a step (compute" in lines[0] and any(line.startswith("next best: ") for line in lines)
    assert f"{decision.considered} candidates" in lines[-2]
    report.draw(decision, tmp_path / "layout.svg", "title")
    text = (tmp_path / "layout.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 10_000
    with pytest.raises(ConfigError, match="name a file that ends in"):
        report.draw(decision, tmp_path / "layout.txt", "title")


@pytest.mark.parametrize("form", ["parallel=auto", "parallel={layout='auto'}", "parallel.layout=auto"])
def test_forms(form: str) -> None:
    config = _load(form)
    assert config.parallel.auto and config.parallel.choose == ["microbatches", "activation_checkpointing"]
    assert loads(dumps(config)) == config
    given = _load(form, "train.microbatches=2", "train.activation_checkpointing=none", "parallel.language_model.tp=2")
    assert given.parallel.choose == [] and given.parallel.language_model.model_fields_set == {"tp"}
    assert loads(dumps(given)).parallel.model_dump(exclude_unset=True) == given.parallel.model_dump(exclude_unset=True)


def test_a_batch_may_be_left_open_only_where_it_is_chosen() -> None:
    train: dict[str, Any] = {"steps": 3, "microbatches": 2}
    config = _load("parallel=auto", train=dict(train))
    assert config.parallel.choose == ["batch_size", "activation_checkpointing"]
    with pytest.raises(ConfigError, match="batch_size"):
        _load(train=dict(train))
    with pytest.raises(ConfigError, match="max_ranks is for layout = 'auto'"):
        _load("parallel.max_ranks=2")
    with pytest.raises(ConfigError, match=r"parallel.layout should be 'auto'"):
        _load("parallel.layout=aut")


def test_numbers_of_ranks() -> None:
    assert worlds_up_to(1) == [1] and worlds_up_to(6) == [1, 2, 3, 4, 6] and worlds_up_to(16) == [1, 2, 3, 4, 8, 16]


def test_planning_for_gpus_that_are_not_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, file = tmp_path / "tiny.toml", tmp_path / "layout.toml"
    path.write_text(TINY.format(folder=tmp_path))
    gpus = ["plan", "choose", str(path), "--tflops", "1"]
    assert main([*gpus, "--gpus", "1", "--memory", "1", "--out", str(file)]) == 0
    output = capfd.readouterr().out
    assert "[parallel]" in output and "counted FLOPs at 1 TFLOP/s" in output
    config = loads(path.read_text(), ["parallel=auto"])
    assert layout_file.with_layout(config, file.read_text(), "layout.toml").world_size() == 1
    assert main([*gpus, "--gpus", "1", "--memory", "0.0001"]) == 2
    assert "lacks" in (error := capfd.readouterr().err) and "--memory" in error
    assert main(["simulate", str(path), "--set", "parallel=auto"]) == 2
    error = capfd.readouterr().err
    assert "says no layout yet" in error and f"interlace plan choose {path} --gpus N --memory GB" in error
    assert "--set 'parallel={dp=2}'" in error and main(["plan", str(path), "--set", "parallel={dp=2}"]) == 0
