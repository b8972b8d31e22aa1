from __future__ import annotations

import math

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from interlace.modalities.audio import AudioSpec, clip_info, decode_audio, load_audio, log_mel
from interlace.modalities.errors import DecodeError
from interlace.modalities.image import ImageSpec, ImageTooLarge, decode_image, image_size, load_image, svg_size
from tests.data.package import write_clip, write_png, write_svg


@given(
    st.floats(1, 4000), st.floats(1, 4000), st.sampled_from([1, 4, 14, 16, 32]), st.sampled_from([1, 4, 16, 64, 1024])
)
def test_fit_keeps_the_budget_the_patch_and_the_aspect(width, height, patch, budget):
    spec = ImageSpec(patch, budget)
    if max(width, height) > budget * min(width, height):
        with pytest.raises(ImageTooLarge, match="too elongated"):
            spec.fit(width, height)
        return
    channels, h, w = spec.fit(width, height)
    assert channels == 3 and h % patch == 0 and w % patch == 0
    rows, columns = h // patch, w // patch
    assert rows >= 1 and columns >= 1 and rows * columns <= budget
    # Each side is within one patch of a common scale of the image; the scale is 1 if the budget allows it.
    scale = min(1.0, math.sqrt(budget / (width / patch * (height / patch))))
    exact_rows, exact_columns = height * scale / patch, width * scale / patch
    if min(exact_rows, exact_columns) >= 1:
        assert abs(rows - exact_rows) <= 1 and abs(columns - exact_columns) <= 1
    if round(width / patch) * round(height / patch) <= budget and min(width, height) >= patch:
        assert (rows, columns) == (round(height / patch), round(width / patch))


def test_too_large_for_the_budget_names_file_need_and_remedy():
    spec = ImageSpec(16, 64)
    assert spec.fit(1226, 309, strict=False)[1:] == (64, 240)
    with pytest.raises(ImageTooLarge, match=r"car\.png: 1226x309 .* 19x77 = 1463 image tokens, the budget is 64"):
        spec.fit(1226, 309, "car.png", strict=True)
    with pytest.raises(ImageTooLarge, match=r"pen\.png: 1000x10 .*too elongated for 64 .*raise max_image_tokens"):
        spec.fit(1000, 10, "pen.png")


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ('width="30" height="20"', (30, 20)),
        ("width='30px' height='20PX'", (30, 20)),
        ('width="72pt" height="1in"', (96, 96)),
        ('width="2.54cm" height="25.4mm"', (96, 96)),
        ('viewBox="0 0 40.5 20"', (40.5, 20)),
        ('width="100%" height="100%" viewBox="-5,-5,40,20"', (40, 20)),
        ('stroke-width="3" width="7" height="1e1"', (7, 10)),
    ],
)
def test_svg_size(tmp_path, attributes, size):
    write_svg(tmp_path / "a.svg", attributes)
    assert svg_size(tmp_path / "a.svg") == pytest.approx(size)
    pixels = decode_image(tmp_path / "a.svg", (3, 16, 32))
    assert pixels.shape == (3, 16, 32) and pixels.min() < 255


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.png", b"", "cannot identify image file"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(8), "Truncated"),
        ("a.svg", b"nothing", "no <svg>"),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "without a usable width"),
    ],
)
def test_broken_headers_name_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DecodeError, match=rf"{name}: .*{message}"):
        image_size(tmp_path / name)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "1"])
def test_every_png_mode_decodes_at_its_size(tmp_path, mode):
    write_png(tmp_path / "a.png", 50, 20, mode=mode)
    assert image_size(tmp_path / "a.png") == (50, 20)
    pixels = decode_image(tmp_path / "a.png", (3, 20, 50))
    assert pixels.dtype == np.uint8
    image = Image.open(tmp_path / "a.png").convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    expected = np.asarray(Image.alpha_composite(white, image).convert("RGB")).transpose(2, 0, 1)
    assert (pixels == expected).all()


def test_transparent_pixels_become_white_and_do_not_bleed(tmp_path):
    pixels = np.zeros((32, 32, 4), dtype=np.uint8)
    pixels[:, :16] = (255, 0, 0, 255)  # opaque red, beside transparent black
    Image.fromarray(pixels).save(tmp_path / "a.png")
    small = decode_image(tmp_path / "a.png", (3, 16, 16))
    assert (small[:, :, 12:] == 255).all()
    assert small[0].min() >= 250  # black would darken the red at the edge


def test_normalisation():
    array = np.array([[[0, 255]]] * 3, dtype=np.uint8)
    assert ImageSpec().tensor(array).tolist() == [[[-1.0, 1.0]]] * 3
    assert ImageSpec(mean=(0, 0, 0), std=(0.5, 1, 2)).tensor(array)[:, 0, 1].tolist() == [2.0, 1.0, 0.5]


def test_svg_drawn_with_fonts_only_is_reported_not_blank(tmp_path):
    write_svg(tmp_path / "a.svg", 'width="40" height="40"', '<text x="3" y="20">W</text>')
    with pytest.raises(DecodeError, match=r"a\.svg: SVG renders to nothing"):
        decode_image(tmp_path / "a.svg", (3, 16, 16))


@pytest.mark.parametrize("rate", [5000, 8000, 11_127, 16_000, 22_050, 22_254, 44_100, 48_000])
@pytest.mark.parametrize("seconds", [0.16, 0.333, 1.0])
def test_mel_frames_are_known_from_the_header(tmp_path, rate, seconds):
    write_clip(tmp_path / "a.wav", seconds, rate=rate)
    spec = AudioSpec()
    frames, header_rate = clip_info(tmp_path / "a.wav")
    assert header_rate == rate
    mel = decode_audio(tmp_path / "a.wav", spec)
    assert mel.shape == spec.shape(frames, rate) and mel.dtype == np.float16
    assert mel.shape[1] == pytest.approx(seconds * 100, abs=1)


def test_mel_is_whispers_own_and_hears_the_right_pitch(tmp_path):
    from transformers import WhisperFeatureExtractor

    t = np.arange(48_000) / 48_000
    soundfile.write(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 1000 * t), 48_000)
    mel = decode_audio(tmp_path / "a.wav", AudioSpec())
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    extractor = WhisperFeatureExtractor(feature_size=80)
    expected = extractor(tone, sampling_rate=16_000, padding=False, truncation=False, return_tensors="np")
    expected = expected["input_features"][0]
    assert expected.shape == mel.shape
    inner = slice(10, 90)
    assert (mel[:, inner].mean(1).argmax() == expected[:, inner].mean(1).argmax()) and mel.std() > 0.1
    peak = expected[:, inner].mean(1).argmax()
    assert np.abs(mel[peak, inner].astype(np.float32) - expected[peak, inner]).max() < 0.01


def test_clip_errors_name_the_file(tmp_path):
    (tmp_path / "a.ogg").write_bytes(b"OggS" + bytes(100))
    with pytest.raises(DecodeError, match=r"a\.ogg"):
        clip_info(tmp_path / "a.ogg")
    with pytest.raises(DecodeError, match=r"a\.ogg"):
        decode_audio(tmp_path / "a.ogg", AudioSpec())
    write_clip(tmp_path / "b.wav", 2.0, rate=8000)
    with pytest.raises(DecodeError, match=r"b\.wav: 2\.0 s is longer than max_audio_seconds = 1"):
        load_audio(tmp_path / "b.wav", AudioSpec(max_seconds=1))
    with pytest.raises(DecodeError, match="too short"):
        log_mel(np.zeros(100, dtype=np.float32), 16_000, AudioSpec())
    with pytest.raises(DecodeError, match="not finite"):
        log_mel(np.full(16_000, np.nan, dtype=np.float32), 16_000, AudioSpec())


def test_single_files_for_generation(tmp_path):
    write_png(tmp_path / "a.png", 100, 20)
    assert load_image(tmp_path / "a.png", ImageSpec(16, 64)).shape == (3, 16, 96)
    write_png(tmp_path / "a.jpg", 40, 40, mode="RGB")
    assert load_image(tmp_path / "a.jpg", ImageSpec(8, 64)).shape == (3, 40, 40)
    write_clip(tmp_path / "a.ogg", 0.5)
    assert load_audio(tmp_path / "a.ogg", AudioSpec()).shape == (80, 50)
    with pytest.raises(DecodeError, match=r"none\.jpg"):
        load_image(tmp_path / "none.jpg", ImageSpec())


def test_specs_refuse_nonsense():
    with pytest.raises(ValueError, match="patch_size and max_tokens"):
        ImageSpec(0)
    with pytest.raises(ValueError, match="std > 0"):
        ImageSpec(std=(0, 1, 1))
    with pytest.raises(ValueError, match="mel_bins"):
        AudioSpec(max_seconds=0)
