"""A small stamps folder written by the test itself: PNG, SVG, OGG and WAV files and captions. It has every peculiarity
of the real package, and broken files of each kind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from interlace.data.builtin.stamps import KINDS, Settings

LANGUAGES = ("en", "fr", "ru")
WORDS = {"en": "A thing number {}.", "fr": "Une chose numéro {}.", "ru": "Вещь номер {}."}


def write_png(path: Path, width: int, height: int, *, seed: int = 0, mode: str = "RGBA") -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_svg(path: Path, size: str, body: str = '<rect x="2" y="2" width="20" height="9" fill="#a03"/>') -> None:
    path.write_text(f'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"\n {size}>{body}</svg>')


def write_clip(path: Path, seconds: float, *, rate: int = 44_100, channels: int = 2, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    samples = 0.1 * rng.standard_normal((int(seconds * rate), channels))
    soundfile.write(path, samples, rate, format="WAV" if path.suffix == ".wav" else "OGG")


def write_captions(path: Path, number: int, languages: tuple[str, ...] = LANGUAGES) -> None:
    lines = [WORDS["en"].format(number) if "en" in languages else ""]
    lines += [f"{language}.utf8={WORDS[language].format(number)}" for language in languages if language != "en"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_tree(root: Path) -> Path:
    """24 valid stamps in ``things``, unusual ones in ``odd``, broken files in ``broken``."""
    for folder in ("things", "odd", "broken"):
        (root / folder).mkdir(parents=True)
    rates = [44_100, 48_000, 22_050, 16_000, 8_000, 22_254]
    for n in range(24):
        stem = root / "things" / f"thing{n:02}"
        write_captions(stem.with_suffix(".txt"), n)
        if n % 3 == 0:
            write_svg(stem.with_suffix(".svg"), f'width="{30 + 7 * n}" height="{90 + n}pt"')
        else:
            write_png(stem.with_suffix(".png"), 12 + 9 * n, 250 - 8 * n, seed=n, mode=["RGBA", "LA", "P", "RGB"][n % 4])
        for k, language in enumerate(LANGUAGES):
            name = f"{stem.name}_desc.ogg" if language == "en" else f"{stem.name}_desc_{language}.ogg"
            write_clip(stem.with_name(name), 0.2 + 0.03 * n, rate=rates[n % 6], channels=1 + n % 2, seed=100 * n + k)
    odd, broken = root / "odd", root / "broken"
    # odd: valid, but unusual
    write_captions(odd / "both.txt", 30)
    write_svg(odd / "both.svg", 'viewBox="0 0 40 20"')  # no width and height
    write_png(odd / "both.png", 40, 20)
    write_png(odd / "both_mirror.png", 40, 20)
    write_clip(odd / "both_desc_fr.ogg.ogg", 0.3)
    write_clip(odd / "both_desc_ru.wav", 0.3, rate=44_100, channels=1)
    write_clip(odd / "both.ogg", 0.2)  # a sound effect
    write_captions(odd / "twin.txt", 31)  # shares its recording with both
    write_png(odd / "twin.png", 33, 20, seed=5)
    shutil.copy(odd / "both_desc_fr.ogg.ogg", odd / "twin_desc_fr.ogg")
    write_captions(odd / "long.txt", 32, ("en",))
    write_png(odd / "long.png", 1500, 3)  # no budget can hold its shape
    write_clip(odd / "long_desc.ogg", 5.0)
    write_clip(odd / "long_desc_fr.ogg", 0.4)  # no French caption
    write_png(odd / "uncaptioned.png", 20, 20)
    (odd / "voiceonly.txt").write_bytes(b"\xef\xbb\xbfA voice.\nfr.utf8= Une voix. \nnot a caption\nru.utf8=\n")
    write_clip(odd / "voiceonly_desc_fr.ogg", 0.5)
    (odd / "wordy.txt").write_text("word " * 400 + "\nfr.utf8=Un mot.\n")
    write_png(odd / "wordy.png", 30, 30)
    # broken: each must be found, reported by name, and left out
    for n, name in enumerate(("header", "pixels", "svg", "fonts", "clip", "middle", "text")):
        write_captions(broken / f"{name}.txt", 40 + n)
    (broken / "header.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    write_png(broken / "pixels.png", 60, 60)
    data = (broken / "pixels.png").read_bytes()
    (broken / "pixels.png").write_bytes(data[: len(data) // 2])
    (broken / "svg.svg").write_text('<svg width="20" height="20"><rect')
    write_svg(broken / "fonts.svg", 'width="40" height="40"', '<text x="3" y="20">W</text>')
    write_png(broken / "fonts.png", 40, 40)  # stands in for the SVG
    (broken / "clip_desc_fr.ogg").write_bytes(b"OggS" + bytes(200))
    write_clip(broken / "middle_desc_fr.ogg", 3.0)
    data = bytearray((broken / "middle_desc_fr.ogg").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    (broken / "middle_desc_fr.ogg").write_bytes(data)
    (broken / "text.txt").write_bytes("Un œuf à la crème".encode("latin-1", errors="replace") + b"\xe9\xff")
    return root


BROKEN = {
    "broken/header.png",
    "broken/pixels.png",
    "broken/svg.svg",
    "broken/fonts.svg",
    "broken/clip_desc_fr.ogg",
    "broken/middle_desc_fr.ogg",
    "broken/text.txt",
}


SETTINGS = Settings(
    records=150, held_out=0.3, languages=LANGUAGES, seconds=4.0, looks=3, side=48, vocabulary=400,
    mixture=dict.fromkeys(KINDS, 1.0),
)  # fmt: skip


def cached(cache: Path) -> Path:
    """The tree in the place where `fetch` puts the real one; returns its folder."""
    root = build_tree(cache / "stamps/1/stamps")
    (cache / "stamps/1/complete.json").write_text("{}")
    return root
