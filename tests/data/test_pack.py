from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import interlace.data.pack as pack_module
from interlace.data.media import AudioSpec, DecodeError, ImageSpec, ImageTooLarge
from interlace.data.pack import decode_item, open_pack
from tests.data.package import write_png

SPEC = ImageSpec()


def image_items(tree: Path, spec: ImageSpec = SPEC):
    from interlace.data.index import load_index

    items = []
    for image in (i for s in load_index(tree).stamps for i in s.images):
        try:
            items.append((image.path, spec.fit(image.width, image.height)))
        except ImageTooLarge:
            continue
    return items


def clip_items(tree: Path, spec: AudioSpec):
    from interlace.data.index import load_index

    clips = [c for s in load_index(tree).stamps for c in s.clips.values()]
    return [(c.path, spec.shape(c.frames, c.rate)) for c in clips]


@pytest.mark.parametrize(("modality", "workers"), [("vision", 0), ("audio", 0), ("audio", 2)])
def test_every_file_is_decoded_or_named(tree, tmp_path, modality, workers, caplog):
    spec: ImageSpec | AudioSpec = SPEC
    items, broken = image_items(tree), {"broken/pixels.png", "broken/svg.svg", "broken/fonts.svg"}
    if modality == "audio":
        spec, items, broken = AudioSpec(), clip_items(tree, AudioSpec()), {"broken/middle_desc_fr.ogg"}
    pack = open_pack(tree, items, spec, tmp_path, workers=workers)
    assert set(pack.failures) == broken
    assert set(pack.shapes) == {path for path, _ in items} - broken
    for item in items:
        if item[0] not in broken:
            array = pack.read(item[0])
            assert array.shape == item[1]
            assert (array == decode_item(tree, item, spec)).all()
    assert not caplog.records  # whoever asked for the pack tells, once
    assert all(str(tree) not in reason for reason in pack.failures.values())
    assert not list((tmp_path / "packs").glob(".tmp*"))


def test_second_opening_decodes_nothing(tree, tmp_path, monkeypatch):
    items = image_items(tree)
    first = open_pack(tree, items, SPEC, tmp_path)
    monkeypatch.setattr(pack_module, "_process", lambda *a: pytest.fail("decoded again"))
    again = open_pack(tree, items, SPEC, tmp_path)
    assert again.failures == first.failures and again.entries == first.entries
    other = ImageSpec(patch_size=8)
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        open_pack(tree, image_items(tree, other), other, tmp_path)


def test_damaged_packs_are_noticed(tree, tmp_path, caplog):
    items = image_items(tree)
    pack = open_pack(tree, items, SPEC, tmp_path)
    part = pack.folder / "part0.bin"
    whole = part.read_bytes()
    path = "things/thing01.png"
    expected = pack.read(path)
    # A flipped bit: this item alone is decoded again.
    _, offset, _ = pack.entries[path]
    damaged = bytearray(whole)
    damaged[offset] ^= 1
    part.write_bytes(damaged)
    pack = open_pack(tree, items, SPEC, tmp_path)
    assert (pack.read(path) == expected).all() and "is damaged; decoding the file again" in caplog.text
    # Torn files: the pack is made again.
    for name, content in (("part0.bin", whole[:100]), ("pack.json", b'{"parts": {'), ("pack.json", b"[]")):
        caplog.clear()
        (pack.folder / name).write_bytes(content)
        assert (open_pack(tree, items, SPEC, tmp_path).read(path) == expected).all()
        assert "building it again" in caplog.text


def test_a_pack_cut_short_while_it_is_open_is_noticed(tree, tmp_path, caplog):
    """Through a memory map this would be SIGBUS."""
    items = image_items(tree)
    pack = open_pack(tree, items, SPEC, tmp_path)
    expected = {path: pack.read(path) for path in pack.shapes}
    os.truncate(pack.folder / "part0.bin", 5000)
    assert all((pack.read(path) == array).all() for path, array in expected.items())
    assert "is damaged; decoding the file again" in caplog.text
    pack = open_pack(tree, items, SPEC, tmp_path)
    shutil.rmtree(pack.folder)  # pruned by another run
    assert all((pack.read(path) == array).all() for path, array in expected.items())


def test_what_a_killed_builder_left_is_removed(tree, tmp_path):
    folder = open_pack(tree, image_items(tree), SPEC, tmp_path).folder
    shutil.rmtree(folder)
    (folder.with_name(f".tmp-{folder.name}-12345")).mkdir()
    open_pack(tree, image_items(tree), SPEC, tmp_path)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_bounded_on_disk(tree, tmp_path):
    items = image_items(tree)
    pack = open_pack(tree, items, SPEC, tmp_path, limit_bytes=50_000)
    assert (pack.folder / "part0.bin").stat().st_size <= 50_000
    assert len(pack.shapes) == len(items) - 3  # all verified
    for path, shape in items:
        if path in pack.shapes:
            assert (pack.read(path) == decode_item(tree, (path, shape), SPEC)).all()
    for n in range(pack_module.KEPT_PACKS + 2):
        open_pack(tree, items[:1], ImageSpec(max_tokens=100 + n), tmp_path)
    assert len(list((tmp_path / "packs").glob("vision-*/"))) == pack_module.KEPT_PACKS


def test_a_file_that_vanishes_afterwards_raises(own_tree, tmp_path):
    pack = open_pack(own_tree, image_items(own_tree), SPEC, tmp_path, limit_bytes=0)
    (own_tree / "things/thing01.png").unlink()
    with pytest.raises(DecodeError, match=r"thing01\.png"):
        pack.read("things/thing01.png")


@pytest.fixture()
def treacherous_decoder(tmp_path, monkeypatch):
    """A resvg that ends or stalls the process on two files, as a broken native library would."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/resvg_py.py").write_text(
        textwrap.dedent("""
        import io, os, time
        from PIL import Image
        def svg_to_bytes(*, svg_path, width, height, **_):
            name = os.path.basename(svg_path)
            if name.startswith("crash"): os._exit(139)
            if name.startswith("hang"): time.sleep(600)
            out = io.BytesIO()
            Image.new("RGBA", (width, height), "red").save(out, "png")
            return out.getvalue()
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(pack_module, "ITEM_TIMEOUT", 6.0)


def test_a_crashing_or_hanging_decoder_costs_its_file_only(tmp_path, treacherous_decoder):
    root = tmp_path / "files"
    root.mkdir()
    items = []
    for n in range(8):
        name = {2: "crash", 4: "hang", 7: "crash_last"}.get(n, f"fine{n}") + ".svg"
        (root / name).write_text('<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16"/>')
        items.append((name, (3, 16, 16)))
    pack = open_pack(root, items, SPEC, tmp_path, workers=2)
    assert pack.failures == {
        "crash.svg": "the decoder crashed (exit status 139)",
        "crash_last.svg": "the decoder crashed (exit status 139)",
        "hang.svg": "the decoder did not finish within 6 s",
    }
    for path in pack.shapes:
        assert (pack.read(path) == np.array([255, 0, 0])[:, None, None]).all()


def test_workers_that_cannot_start_are_an_error_not_broken_files(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="decoding worker crashed"):
        open_pack(tree, image_items(tree), SPEC, tmp_path, workers=2)
    assert not list((tmp_path / "packs").glob("vision-*/"))


def test_missing_library_says_what_to_install(tree, tmp_path, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("interlace.data.media.version", absent)
    with pytest.raises(ImportError, match=r"pillow is needed .*pip install 'interlace\[data\]'"):
        open_pack(tree, image_items(tree), SPEC, tmp_path)


def test_two_processes_build_it_once(tmp_path):
    root = tmp_path / "files"
    root.mkdir()
    for n in range(4):
        write_png(root / f"{n}.png", 900, 900, seed=n)
    program = textwrap.dedent(f"""
        import json, logging, sys
        from pathlib import Path
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        from interlace.data.pack import open_pack
        from interlace.data.media import ImageSpec
        items = [(f"{{n}}.png", (3, 128, 128)) for n in range(4)]
        pack = open_pack(Path({str(root)!r}), items, ImageSpec(), Path({str(tmp_path)!r}), workers=0)
        print(json.dumps(sorted(pack.shapes)))
        """)
    package = str(Path(pack_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package}
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    assert [json.loads(lines[-1]) for lines in outputs] == [["0.png", "1.png", "2.png", "3.png"]] * 2
    assert sum(line.startswith("decoded 4 pictures") for lines in outputs for line in lines) == 1


def test_a_pack_that_was_read_goes_to_worker_processes(tree, tmp_path):
    pack = open_pack(tree, image_items(tree), SPEC, tmp_path)
    path = next(iter(pack.entries))
    wanted = pack.read(path)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(pack)).read(path), wanted)
