"""The files of a checkpoint: other tools can read them, and nothing in them is ever executed."""

from __future__ import annotations

import builtins
import copy
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.checkpoint import storage
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.storage import CheckpointError, Stored, StoredChunk


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ck, checkpointfolder):
        monkeypatch.setattr(module, "LATE_SECONDS", 0.0)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _store(folder: Path, model: nn.Module) -> ck.Checkpoints:
    return ck.Checkpoints(
        folder, keep=2, identity=identity_of(model, {"language_model": {"architecture": "LlamaForCausalLM"}})
    )


def _saved(folder: Path) -> Path:
    model = _model()
    parameters = dict(model.named_parameters())
    return _store(folder, model).save(3, parameters, {f"exp_avg.{n}": p for n, p in parameters.items()}, {"a": [1]})


def _load(path: Path) -> dict[str, Any]:
    """All operations of Interlace on a foreign checkpoint."""
    model = _model()
    store = _store(path.parent, model)
    parameters = dict(model.named_parameters())
    assert store.newest(path) == path
    progress = store.load(path, parameters, {f"exp_avg.{n}": torch.zeros_like(p) for n, p in parameters.items()})
    ck.load_parameters(path, model, store.identity)
    return progress


DTYPES = sorted(storage.DTYPES)


@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_files_are_safetensors(
    tensors: dict[str, tuple[str, list[int]]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The reader of the safetensors library finds the same tensors, and so does Interlace's."""
    generator = torch.Generator().manual_seed(seed)
    wanted = {
        name: (200 * torch.rand(shape, generator=generator) - 50).to(storage.DTYPES[code])
        for name, (code, shape) in tensors.items()
        if name != "__metadata__"
    }
    folder = tmp_path_factory.mktemp("file")
    file, begins = storage.write_tensors(folder / "rank-00000.safetensors", wanted)
    assert file.size == (folder / "rank-00000.safetensors").stat().st_size
    assert file.sha256 == storage.digest(folder / "rank-00000.safetensors")
    theirs = load_file(folder / "rank-00000.safetensors")
    assert set(theirs) == set(wanted)
    for name, tensor in wanted.items():
        assert begins[name] % tensor.element_size() == 0
        shape = list(tensor.shape)
        chunk = StoredChunk(offsets=[0] * len(shape), sizes=shape, file="rank-00000.safetensors", begin=begins[name])
        ours = storage.read_chunk(folder, Stored(dtype=tensors[name][0], shape=shape, chunks=[chunk]), chunk)
        for result in (ours, theirs[name]):
            assert result.dtype == tensor.dtype and result.shape == tensor.shape
            assert torch.equal(result.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_in_chunks_is_put_together(tmp_path: Path) -> None:
    """As written by ranks with shards: cut along both dimensions, in files of two ranks."""
    path = _saved(tmp_path)
    whole = torch.randn(3, 4)
    pieces = {(0, 0): whole[:2, :3], (2, 0): whole[2:, :3], (0, 3): whole[:, 3:]}
    chunks = []
    manifest = storage.read_manifest(path).model_dump(mode="json")
    for rank, (offsets, piece) in enumerate(pieces.items()):
        name = f"rank-{rank + 7:05d}.safetensors"
        file, begins = storage.write_tensors(path / name, {"0.weight@": piece})
        manifest["files"][name] = file.model_dump()
        sizes = list(piece.shape)
        chunks.append({"offsets": list(offsets), "sizes": sizes, "file": name, "begin": begins["0.weight@"]})
    manifest["tensors"]["model.0.weight"]["chunks"] = chunks
    _write_manifest(path, manifest)
    model = _model()
    ck.load_parameters(path, model, _store(tmp_path, model).identity)
    assert torch.equal(model[0].weight, whole)


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with a valid checksum, as an attacker would."""
    table = {key: value for key, value in manifest.items() if key != "sha256"}
    (path / storage.MANIFEST).write_text(json.dumps({**table, "sha256": storage._digest_of(table)}))


# --- hostile checkpoints --------------------------------------------------------------------------------------


class _Calls:
    """Unpickled, calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.how = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.how


def _hostile(canary: Path) -> Iterator[tuple[str, bytes]]:
    touch = f"touch {canary}"
    calls = {
        "system": _Calls(os.system, touch),
        "eval": _Calls(eval, f"open({str(canary)!r}, 'w').close()"),
        "exec": _Calls(exec, f"open({str(canary)!r}, 'w').close()"),
        "nested": {"model": [_Calls(os.system, touch)]},
        "getattr": _Calls(getattr, _Calls(builtins.__import__, "os"), "system"),
    }
    for name, call in calls.items():
        for protocol in (0, 2, 4):
            yield f"{name}, protocol {protocol}", pickle.dumps(call, protocol)
    legacy, modern = io.BytesIO(), io.BytesIO()
    torch.save(calls["system"], legacy, _use_new_zipfile_serialization=False)
    torch.save({"state": calls["nested"]}, modern)
    yield "torch.save, legacy", legacy.getvalue()
    yield "torch.save", modern.getvalue()
    tricked = io.BytesIO()
    with zipfile.ZipFile(tricked, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(calls["eval"], 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    yield "a zip as torch makes them", tricked.getvalue()


@pytest.fixture
def nothing_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module in (pickle, __import__("_pickle")):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(torch, "load", refused)


def test_a_sound_checkpoint_is_read_without_unpickling(tmp_path: Path, nothing_unpickles: None) -> None:
    path = _saved(tmp_path)
    assert _load(path) == {"a": [1], "step": 3}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


def test_hostile_files_never_run(tmp_path: Path) -> None:
    """Pickles in the place of each file and beside them, also under DCP's names; the manifest lists them."""
    canary = tmp_path / "canary"
    path = _saved(tmp_path / "run")
    sound = storage.read_manifest(path).model_dump(mode="json")
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    corpus = list(_hostile(canary))
    assert len(corpus) > 15
    for name, data in corpus:
        for victim in ("rank-00000.safetensors", ".metadata", "__0_0.distcp", "__0.metadata", storage.MANIFEST):
            for file in path.iterdir():
                file.unlink()
            for file, contents in kept.items():
                (path / file).write_bytes(contents)
            (path / victim).write_bytes(data)
            if victim in sound["files"]:
                # The original length, so that the manifest is valid and the reader parses the contents.
                longer = data.ljust(len(kept[victim]), b"\0")
                (path / victim).write_bytes(longer)
                manifest = copy.deepcopy(sound)
                manifest["files"][victim] = {"size": len(longer), "sha256": storage.digest(path / victim)}
                _write_manifest(path, manifest)
            try:
                _load(path)
            except CheckpointError:
                pass
            assert not canary.exists(), (name, victim)
    with pytest.raises(AssertionError, match="ran"):  # the canary runs when they are unpickled
        for _, data in corpus[:1]:
            pickle.loads(data)
            assert not canary.exists(), "ran"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_checkpoints_of_older_formats_are_refused(tmp_path: Path, number: int) -> None:
    """The first format had pickles, the second all weights, the third other fingerprints of a base."""
    path = _saved(tmp_path)
    manifest = storage.read_manifest(path).model_dump(mode="json")
    _write_manifest(path, {**manifest, "format": number})
    with pytest.raises(
        CheckpointError, match=f"format {number}, but this version of Interlace reads 4; continue with the version"
    ):
        _load(path)


LEAVES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        7,
        2**62,
        2**63,
        10**400,
        0.5,
        float("inf"),
        "",
        "../../etc/passwd",
        "F32",
        "U8",
        [],
        {},
        [-1],
    ]
    + [[2**40, 0], [2**61, 2**61], {"a": {}}, "rank-00000.safetensors", "/dev/zero"]
)


def _places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


@given(data=st.data())
@settings(max_examples=150)
def test_a_manifest_that_lies_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One to three places changed, with a valid checksum: an error of Interlace or the same numbers."""
    folder = tmp_path_factory.getbasetemp() / "lying"
    path = folder / "step-00000003"
    if not path.exists():
        _saved(folder)
        (folder / "sound.json").write_bytes((path / storage.MANIFEST).read_bytes())
    manifest = json.loads((folder / "sound.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        places = [place for place in _places(manifest) if place]
        *above, last = data.draw(st.sampled_from(places))
        table = manifest
        for key in above:
            table = table[key]
        if data.draw(st.booleans()) or not isinstance(table, dict):
            table[last] = copy.deepcopy(data.draw(LEAVES))
        else:
            del table[last]
    _write_manifest(path, manifest)
    state = random.getstate()
    try:
        _load(path)
    except CheckpointError:
        pass
    finally:
        random.setstate(state)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("numpy", ["MT19937", [1] * 624, 10**6, 0, 0.0]),  # numpy would read past its 624 words
        ("numpy", ["MT19937", [1] * 624, -5, 0, 0.0]),
        ("numpy", ["MT19937", [1], 0, 0, 0.0]),
        ("numpy", "x"),
        ("python", [3, [1] * 625, None, 4]),
        ("python", [3, [2**70] * 625, None]),
        ("torch", "00" * 5056),
        ("torch", "zz"),
        ("torch", 3),
    ],
)
def test_generators_take_only_their_own_states(tmp_path: Path, part: str, value: Any) -> None:
    model = _model()
    with pytest.MonkeyPatch.context() as patch:
        sound = ck.rng_state()
        patch.setattr(ck, "rng_state", lambda: {**sound, part: value})
        path = _saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"rng\.0 is not a valid state of the random generators"):
        _store(tmp_path, model).load(path, dict(model.named_parameters()), {})


def test_a_file_that_shrinks_after_it_was_verified_is_an_error(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    manifest = storage.read_manifest(path)
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(20)
    stored = manifest.tensors["model.0.weight"]
    with pytest.raises(storage.TornCheckpoint, match=r"rank-00000\.safetensors is shorter than the manifest says"):
        storage.read_chunk(path, stored, stored.chunks[0])
