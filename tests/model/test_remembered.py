"""Probe results are computed once per process and once per machine. Their cache key has all inputs, or they are not
cached.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interlace
from interlace import _core
from interlace.model import MultimodalModel
from interlace.model.collate import JOINED
from interlace.model.counting.layers import counted
from interlace.model.probe import cache as remembered
from interlace.model.probe import language as trial_language
from interlace.model.probe import whole as whole_trial
from interlace.model.probe.cache import decoded, encoded, spelled, use_cache_folder
from interlace.model.probe.encoder import encoder_cuts, encoder_packing, encoder_takes_any_order
from tests.model import wholes
from tests.tiny import tiny_mllm


@pytest.fixture(autouse=True)
def shared_trials() -> None:
    """Disables the shared cache of probe results here."""
    use_cache_folder(None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    use_cache_folder(tmp_path / "trials")
    forget()
    yield tmp_path / "trials"
    use_cache_folder(None)
    forget()


def forget() -> None:
    """Clears the cache, as in a new process."""
    remembered._answers.clear()


def never(*_: Any) -> Any:
    raise AssertionError("tried again")


def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("encoder._packing", "language._packing", "whole._bidirectional"):
        monkeypatch.setattr(f"interlace.model.probe.{where}", never)


def test_the_cache_knows_all_code_of_the_package() -> None:
    root = Path(interlace.__file__).parent
    names = {str(path.relative_to(root)) for path in remembered._files(root)}
    assert names >= {"attention/op.py", "masks/rule.py", "kernels/bitfield_common.py", Path(_core.__file__).name}


def of(name: str) -> MultimodalModel:
    with torch.device("meta"):
        return MultimodalModel.of_whole(wholes.CASES[name].make())


def said(model: MultimodalModel) -> Any:
    [encoder] = model.encoders.values()
    return encoder.packing, encoder.feed, encoder.returned, model.language_settings.bidirectional


MORE = ("llava_onevision", "qwen2_audio", "qwen3_vl")


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_a_whole_model_is_tried_once(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = said(of(name))
    assert len(list(folder.iterdir())) == 3
    forget()
    seldom(monkeypatch)
    assert said(of(name)) == first


def test_what_it_follows_from_makes_another_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(module: nn.Module, what: str = "a", extra: Any = 1) -> int:
        remembered.remembered(what, module, extra, lambda: True)
        forget()
        return len(list(folder.iterdir()))

    module = wholes.llava()
    assert kept(module) == kept(wholes.llava()) == 1
    assert kept(module, "b") == 2 and kept(module, extra=2) == 3
    module.config.text_config.rms_norm_eps = 0.5
    assert kept(module) == 4
    module.get_decoder().layers[0].input_layernorm.variance_epsilon = 0.5
    assert kept(module) == 5
    module.lm_head = nn.Linear(24, 49)
    assert kept(module) == 6
    mlp = type(module.get_decoder().layers[0].mlp)
    code = mlp.forward.__code__
    for other in ({"co_names": (*code.co_names, "more")}, {"co_consts": (*code.co_consts, 0.5)}):
        with monkeypatch.context() as patch:
            patch.setattr(mlp.forward, "__code__", code.replace(**other))
            assert kept(module) == 7 + ("co_consts" in other)
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "_stamp", lambda file: (file, 1, 2))
        assert kept(module) == 9
    monkeypatch.setattr(remembered, "_versions", lambda: "others")
    assert kept(module) == 10


def test_code_of_somebody_is_no_librarys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = wholes.llava()
    with monkeypatch.context() as patch:
        patch.setattr(type(module.get_decoder().layers[0]), "forward", never)
        remembered.remembered("a", module, 1, lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(remembered.transformers, "__version__", "6.0.0.dev0")
        remembered.remembered("a", module, 2, lambda: True)
    assert not folder.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1", '{"Packing": [["name"', '{"os.path": []}', '{"Packing": [["no", 1]]}', "null", "[]", "[1]", "3"],
)
def test_damaged_files_are_written_anew(text: str, folder: Path) -> None:
    module = wholes.llava()
    assert remembered.remembered("a", module, 1, lambda: [True, False]) == [True, False]
    [file] = folder.iterdir()
    good = file.read_text()
    file.write_text(text)
    forget()
    assert remembered.remembered("a", module, 1, lambda: [True, False]) == [True, False]
    assert file.read_text() == good and json.loads(good)


def test_what_is_not_kept(folder: Path) -> None:
    class Own(nn.Linear):
        pass

    module = wholes.llava()
    for answer in (remembered.Packing(remembered.ALONE), torch.zeros(1)):
        remembered.remembered("a", module, repr(answer), lambda answer=answer: answer)
    with pytest.raises(ValueError, match="no"):
        remembered.remembered("a", module, "refused", lambda: (_ for _ in ()).throw(ValueError("no")))
    module.lm_head = Own(24, 48)  # its code is not part of the library
    remembered.remembered("a", module, "own", lambda: True)
    assert not folder.exists()


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 2)
    module = wholes.llava()
    for extra in range(4):
        remembered.remembered("a", module, extra, lambda: True)
    assert len(list(folder.iterdir())) == 2


def test_what_killed_processes_left_goes(folder: Path) -> None:
    folder.mkdir(parents=True)
    old, new = folder / "a.tmp", folder / "b.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    remembered.remembered("a", wholes.llava(), 1, lambda: True)
    assert new.exists() and not old.exists()


def busy(*_: Any, **__: Any) -> Any:
    raise OSError("too many open files")


def full(*_: Any, **__: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")


def ask(what: str, model: MultimodalModel) -> Any:
    settings, language_model = model.language_settings, model.language_model
    return {
        "packing": lambda: trial_language.language_packing(language_model, settings),
        "order": lambda: trial_language.language_takes_any_order(language_model, settings),
        "cuts": lambda: trial_language.allowed_cuts(language_model, settings, (None, None)),
        "cache": lambda: trial_language.caches_right(language_model, settings),
    }[what]()


@pytest.mark.parametrize("what", ["packing", "order", "cuts", "cache"])
def test_a_failure_is_no_answer_for_ever(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache_folder(None)
    model = tiny_mllm()
    use_cache_folder(folder)
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(trial_language, "_steps" if what == "cache" else "run_language", busy)
        ask(what, model)
    assert not folder.exists()
    forget()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="allocate"):
        patch.setattr(trial_language, "_steps" if what == "cache" else "run_language", full)
        ask(what, model)
    forget()
    ask(what, model)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("what", [encoder_takes_any_order, encoder_cuts, encoder_packing])
def test_nor_of_an_encoder(what: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache_folder(None)
    [encoder] = tiny_mllm(encoders=("vision",)).encoders.values()
    use_cache_folder(folder)
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "run", busy)
        with contextlib.suppress(ValueError):  # or it is refused
            what(encoder)
    assert not folder.exists()
    forget()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="allocate"):
        patch.setattr(type(encoder), "run", full)
        what(encoder)
    forget()
    what(encoder)
    assert len(list(folder.iterdir())) == 1


def test_nor_whether_items_that_touch_see_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = whole_trial._errors

    def fails(*given: Any) -> list[float]:
        return busy() if JOINED in given[-1] else errors(*given)

    monkeypatch.setattr(whole_trial, "_errors", fails)
    assert of("gemma3").language_settings.bidirectional is True
    assert len(list(folder.iterdir())) == 2  # of the two modules


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    use_cache_folder(tmp_path / "file" / "trials")
    try:
        assert remembered.remembered("a", wholes.llava(), 2, lambda: True)
    finally:
        use_cache_folder(None)
        forget()


def test_answers_come_back_as_they_were() -> None:
    for value in (None, True, 2, 0.5, "a", [True, False], (1, (2, "b")), {"a": (1,)}, frozenset({"b", "a"})):
        assert decoded(json.loads(json.dumps(encoded(value)))) == value


def test_cache_keys_are_the_same_in_every_process() -> None:
    """The order of a set depends on its construction, that of strings on the process."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert one == other and repr(one) != repr(other) and spelled(one) == spelled(other)
    feed = tiny_mllm(encoders=("vision",)).encoders["vision"].feed
    assert json.loads(spelled(feed))["ImageInputs"] and decoded(json.loads(spelled(feed))) == feed


def test_counts_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {name: counted(tiny_mllm(), name) for name in tiny_mllm().modules_order()}
    forget()
    for where in ("_language", "_encoder"):
        monkeypatch.setattr(f"interlace.model.counting.layers.{where}", never)
    assert {name: counted(tiny_mllm(), name) for name in tiny_mllm().modules_order()} == first
    assert not any(result.why for result in first.values())
