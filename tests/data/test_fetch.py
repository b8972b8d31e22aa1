"""Fetching against replacements of apt-get, dpkg and dpkg-deb: shell scripts first on PATH that use a tar file."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import interlace.data.builtin.fetch as fetch_module
from interlace.data import cache_folder, find_stamps
from interlace.data.builtin.fetch import exclusive, find_or_fetch

APT_GET = """
echo "apt-get $*" >> "$FAKE/calls"
case "$*" in
  *" update") [ -z "$UPDATE_FAILS" ] || { echo "E: Temporary failure resolving 'mirror.invalid'" >&2; exit 100; } ;;
  *" download "*) sleep ${SLOW:-0}
    [ -z "$NO_PACKAGE" ] || { echo "E: Unable to locate package tuxpaint-stamps-default" >&2; exit 100; }
    cp "$FAKE/package.deb" ./tuxpaint-stamps-default_1%3a2.0_all.deb ;;
esac
"""
APT_CACHE = """
echo "Package: tuxpaint-stamps-default"
echo "Size: ${LISTED_SIZE:-$(stat -c %s "$FAKE/package.deb")}"
"""
DPKG_DEB = """
case "$3" in Version) echo 1:2.0 ;; Installed-Size) cat "$FAKE/installed" ;; esac
"""
DPKG = """
[ -z "$DISK_FULL" ] || { mkdir -p "$3/usr/share/tuxpaint/stamps/things"; exit 0; }
[ -z "$UNPACK_FAILS" ] || { mkdir -p "$3/usr"; echo "dpkg-deb: error: corrupt archive" >&2; exit 2; }
mkdir -p "$3" && tar -xf "$2" -C "$3"
"""


@pytest.fixture()
def archive(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the replacements; PATH has them first and INTERLACE_CACHE is an empty cache."""
    import tarfile

    fake = tmp_path / "fake"
    (fake / "bin").mkdir(parents=True)
    for name, body in {"apt-get": APT_GET, "apt-cache": APT_CACHE, "dpkg-deb": DPKG_DEB, "dpkg": DPKG}.items():
        script = fake / "bin" / name
        script.write_text(f"#!/bin/sh\n{body}")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
    with tarfile.open(fake / "package.deb", "w") as tar:
        tar.add(tree, "usr/share/tuxpaint/stamps")
        (fake / "copyright").write_text("GPL-2")
        tar.add(fake / "copyright", "usr/share/doc/tuxpaint-stamps-default/copyright")
    files = [p for p in tree.rglob("*") if p.is_file()]
    folders = sum(p.is_dir() for p in tree.rglob("*")) + 7
    (fake / "installed").write_text(str(sum(-(-p.stat().st_size // 1024) for p in files) + 1 + folders))
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("PATH", f"{fake / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path / "cache"))
    return fake


def leftovers(cache: Path) -> list[str]:
    return [str(p.relative_to(cache)) for p in cache.rglob("*") if ".tmp" in p.name or p.name == "apt"]


def test_fetches_once_into_a_versioned_folder(archive, tree, tmp_path):
    assert find_stamps() is None
    folder, _ = find_or_fetch()
    assert folder == tmp_path / "cache/stamps/1_2.0/stamps" == find_stamps() and find_or_fetch() == (folder, "")
    names = {p.relative_to(tree) for p in tree.rglob("*.png")}
    assert {p.relative_to(folder) for p in folder.rglob("*.png")} == names
    assert (folder.parent / "copyright").read_text() == "GPL-2"
    calls = (archive / "calls").read_text().splitlines()
    assert len(calls) == 2  # the second find_or_fetch used no network
    for call in calls:  # no system files of apt are written
        assert f"Dir::State::lists={tmp_path}/cache/apt/lists" in call and f"Dir::Cache={tmp_path}/cache/apt" in call
    assert not leftovers(tmp_path / "cache")


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            {"UPDATE_FAILS": "1", "NO_PACKAGE": "1"},
            r"apt-get download: Unable to locate package .*\(apt-get update: Temporary failure resolving",
        ),
        ({"LISTED_SIZE": "5"}, r"tuxpaint-stamps-default_1%3a2.0_all.deb is \d+ bytes, the archive lists 5"),
        ({"UNPACK_FAILS": "1"}, "dpkg -x: dpkg-deb: error: corrupt archive"),
        ({"DISK_FULL": "1"}, r"unpacked to \d+ bytes, it declares \d+; is the disk full"),
        ({"SLOW": "30"}, "apt-get download took longer than 1 s"),
    ],
)
def test_trouble_is_one_line_none_and_nothing_left(archive, tmp_path, monkeypatch, trouble, message):
    for key, value in trouble.items():
        monkeypatch.setenv(key, value)
    folder, error = find_or_fetch(timeout=1 if "SLOW" in trouble else 60)
    assert folder is None and "\n" not in error and re.search(message, error), error
    assert find_stamps() is None and not leftovers(tmp_path / "cache")
    for key in trouble:
        monkeypatch.delenv(key)
    assert find_or_fetch()[0] is not None  # the next attempt is not blocked


def test_a_failing_update_alone_does_not_matter(archive, monkeypatch):
    monkeypatch.setenv("UPDATE_FAILS", "1")
    assert find_or_fetch()[0] is not None


def test_no_apt(archive, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder, error = find_or_fetch()
    assert folder is None and error.startswith("apt-get not found")


def test_no_room(archive, monkeypatch):
    import collections

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1, 1, 1 << 20))
    folder, error = find_or_fetch()
    assert folder is None and "has 1 MiB free, 700 MiB are needed" in error


def test_a_cache_that_cannot_be_made(archive, tmp_path):
    (tmp_path / "file").write_text("")
    folder, error = find_or_fetch(tmp_path / "file" / "cache")
    assert folder is None and error


def test_leftovers_of_a_killed_process_are_removed(archive, tmp_path):
    stale = tmp_path / "cache/stamps/.tmp-123/tree"
    stale.mkdir(parents=True)
    half = tmp_path / "cache/stamps/1_2.0/stamps"  # a folder without its complete.json does not count
    half.mkdir(parents=True)
    assert find_stamps() is None
    assert find_or_fetch()[0] is not None and not leftovers(tmp_path / "cache")
    assert list(half.rglob("*.png"))


def test_two_processes_fetch_once(archive, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW", "0.5")
    monkeypatch.setenv("PYTHONPATH", str(Path(fetch_module.__file__).parents[3]))
    command = [
        sys.executable,
        "-c",
        "from interlace.data.builtin.fetch import find_or_fetch; print(find_or_fetch()[0])",
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    result = {process.communicate(timeout=600)[0].strip() for process in processes}
    assert result == {str(tmp_path / "cache/stamps/1_2.0/stamps")}
    assert (archive / "calls").read_text().count(" download ") == 1


def test_waiting_for_a_lock_ends(tmp_path):
    with exclusive(tmp_path / "lock", 5):  # nobody holds the lock
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process has held .*lock for 0\.3 s"):
            with exclusive(tmp_path / "lock", 0.3):
                pass
        assert time.monotonic() - start >= 0.3
    with exclusive(tmp_path / "lock", 0):
        pass


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("INTERLACE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("INTERLACE_CACHE")
    assert cache_folder() == Path("/b/interlace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/interlace"
