"""`interlace plan show --data`: loads of the replicas in the first step, as drawn and balanced."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from interlace.cli import main
from tests.cli import TINY

TWO = ["--tflops", "1", "--set", "parallel.dp=2"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(folder=tmp_path))
    return path


def test_it_draws_the_loads_of_each_module(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "loads.png"
    assert main(["plan", str(tiny), *TWO, "--data", str(picture)]) == 0
    output = capfd.readouterr().out
    for name in ("vision", "language_model"):
        line = next(line for line in output.splitlines() if line.startswith(f"{name}: the costliest of 2 replicas"))
        drawn, balanced = (float(part.split(" times")[0].split()[-1]) for part in (line, line.split("as drawn,")[1]))
        assert 1.0 <= balanced <= drawn
    assert "train.balance = 'llm'" in output
    assert f"wrote {picture}" in output
    assert matplotlib.image.imread(picture).std() > 0


def test_what_it_cannot_draw_is_told(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "loads.png")
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["--data", picture], "every module has one: set parallel.dp"),
        ([*TWO, "--data", str(tmp_path / "loads.txt")], "name a file that ends in .png or .svg"),
        ([*TWO, "--data", picture, "--json"], "leave out --json"),
        ([*TWO, "--data", str(tmp_path / "file" / "loads.png")], "cannot write there"),
    ):
        assert main(["plan", str(tiny), "--tflops", "1", *arguments]) == 2
        assert message in capfd.readouterr().err
    assert not Path(picture).exists()
