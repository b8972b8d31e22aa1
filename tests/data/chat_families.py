"""Processors of several families with tokenizers trained here, and random chats with images of unusual sizes."""

from __future__ import annotations

import copy
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.image_utils import load_image
from transformers.utils import is_torchvision_available

from interlace.data.chats.encoding import load as chats_load

WORDS = (
    "the cat sits on a red mat while it rains, and seven birds sing: \u00e9t\u00e9, \u732b, \U0001f426! What is this? "
    "A house with 2 doors. Describe the picture. user assistant system Assistant User\n\n"
)

PARTS = (
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}VIDEO{% else %}IMAGE{% endif %}{% endfor %}<|im_end|>"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}" + PARTS + "{% endgeneration %}\n"
    "{% else %}" + PARTS + "\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'][0]['text'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ first if loop.first else '' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% else %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{% if message['role'] != 'assistant' %}"
    "{{ part['text'] + ' ' }}{% else %}{% generation %}{{ part['text'] + '</s>' }}{% endgeneration %}"
    "{% endif %}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


QWEN_AUDIO = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{% set audio_count.value = audio_count.value + 1 %}"
    "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


VIDEOS = is_torchvision_available()
"""Whether processors with a part for videos have it."""
needs_torchvision = pytest.mark.skipif(not VIDEOS, reason="processors for videos need torchvision")


class Family(NamedTuple):
    processor: Any
    placeholder: int
    """The id that stands for a picture's features, or a clip's."""
    video: int | None = None
    """That for a video's, where it is another."""
    encoder: str = "vision"

    @property
    def placeholders(self) -> dict[str, Any]:
        return {self.encoder: self.placeholder if self.video is None else (self.placeholder, self.video)}


def trained(named: dict[str, str], more: tuple[str, ...] = (), *, size: int = 400) -> Any:
    """A byte-level BPE tokenizer with these special tokens; the named ones are attributes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", *named.values(), *more]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [WORDS] * 20, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=dict(named),
    )


def _loaded(folder: Path, name: str, tokenizer: Any, *parts: Any, template: str, **said: Any) -> Any:
    """A processor as stored in its folder, loaded by the code under test. parts: all but the tokenizer."""
    for part in (tokenizer, *parts):
        part.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **said}))
    (folder / "chat_template.jinja").write_text(template)
    return chats_load.load_processor(folder)


def _video(name: str, **said: Any) -> list[Any]:
    """The video component, if it can be made."""
    return [getattr(transformers, name)(**said)] if VIDEOS else []


def llava(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>"})
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    said = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return Family(
        _loaded(folder, "LlavaProcessor", tokenizer, pixels, template=LLAVA, **said),
        tokenizer.convert_tokens_to_ids("<image>"),
    )


def llava_next(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>"})
    pixels = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    )
    said = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    made = _loaded(folder, "LlavaNextProcessor", tokenizer, pixels, template=LLAVA, **said)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def llava_next_video(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>", "video_token": "<video>"})
    pixels = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    )
    said = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    video = _video("LlavaNextVideoVideoProcessor", size={"height": 28, "width": 28})
    made = _loaded(folder, "LlavaNextVideoProcessor", tokenizer, pixels, *video, template=LLAVA, **said)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def llava_onevision(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>", "video_token": "<video>"}, ("<|im_start|>", "<|im_end|>"))
    pixels = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    )
    said = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    template = CHATML.replace("IMAGE", "<image>").replace("VIDEO", "<video>")
    video = _video("LlavaOnevisionVideoProcessor", size={"height": 28, "width": 28})
    made = _loaded(folder, "LlavaOnevisionProcessor", tokenizer, pixels, *video, template=template, **said)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def _qwen(folder: Path, processor: str, pixels: Any, video: str, **said: Any) -> Family:
    tokenizer = trained(
        {}, ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
    template = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    template = template.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>")
    made = _loaded(folder, processor, tokenizer, pixels, *_video(video, **said), template=template)
    ids = tokenizer.convert_tokens_to_ids
    return Family(made, ids("<|image_pad|>"), ids("<|video_pad|>"))


SIZE = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12}


def qwen2_vl(folder: Path) -> Family:
    pixels = transformers.Qwen2VLImageProcessorPil(size=SIZE)
    return _qwen(folder, "Qwen2VLProcessor", pixels, "Qwen2VLVideoProcessor", size=SIZE, cap_pixels_per_frame=False)


def qwen2_5_vl(folder: Path) -> Family:
    """Its video processor samples 2 frames per second."""
    pixels = transformers.Qwen2VLImageProcessorPil(size=SIZE)
    said = {"size": SIZE, "cap_pixels_per_frame": True, "do_sample_frames": True, "fps": 2}
    return _qwen(folder, "Qwen2_5_VLProcessor", pixels, "Qwen2VLVideoProcessor", **said)


def qwen3_vl(folder: Path) -> Family:
    size = {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 40}
    pixels = transformers.Qwen2VLImageProcessorPil(size=size, patch_size=16)
    return _qwen(folder, "Qwen3VLProcessor", pixels, "Qwen3VLVideoProcessor", size=size, cap_pixels_per_frame=False)


qwen3_vl_moe = qwen3_vl


def gemma3(folder: Path, **said: Any) -> Family:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = trained(named, ("<start_of_turn>", "<end_of_turn>"))
    pixels = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **said)
    made = _loaded(folder, "Gemma3Processor", tokenizer, pixels, template=GEMMA, image_seq_length=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<image_soft_token>"))


ROWS = tuple(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))
PATCHED = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


def idefics3(folder: Path) -> Family:
    more = ("<|im_start|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokenizer = trained({}, (*more, *ROWS), size=460)
    pixels = transformers.Idefics3ImageProcessorPil(**PATCHED)
    made = _loaded(folder, "Idefics3Processor", tokenizer, pixels, template=IDEFICS, image_seq_len=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def smolvlm(folder: Path) -> Family:
    """Needs num2words."""
    more = ("<|im_start|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>")
    tokenizer = trained({}, (*more, *ROWS), size=460)
    pixels = transformers.SmolVLMImageProcessorPil(**PATCHED)
    video = _video(
        "SmolVLMVideoProcessor", **PATCHED, video_sampling={"max_frames": 4, "fps": 1, "video_size": PATCHED["size"]}
    )
    made = _loaded(folder, "SmolVLMProcessor", tokenizer, pixels, *video, template=IDEFICS, image_seq_len=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def internvl(folder: Path) -> Family:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = trained(named, ("<|im_start|>", "<|im_end|>"))
    pixels = transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    template = CHATML.replace("IMAGE", "<IMG_CONTEXT>\n").replace("VIDEO", "<video>\n")
    said = {"size": {"height": 28, "width": 28}, "do_sample_frames": True, "num_frames": 3}
    video = _video("InternVLVideoProcessor", **said)
    made = _loaded(folder, "InternVLProcessor", tokenizer, pixels, *video, template=template, image_seq_length=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"))


def qwen2_audio(folder: Path) -> Family:
    more = ("<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = trained({}, more)
    hearing = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    made = _loaded(folder, "Qwen2AudioProcessor", tokenizer, hearing, template=QWEN_AUDIO)
    return Family(made, tokenizer.convert_tokens_to_ids("<|AUDIO|>"), encoder="audio")


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "internvl": internvl,
}


def pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Images of unusual sizes and kinds: some grayscale, some with transparency, some rotated by their camera."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(count):
        width, height = (int(side) for side in rng.integers(17, 140, 2))
        kind = ["RGB", "L", "RGBA", "P"][number % 4]
        small = Image.fromarray(rng.integers(0, 256, (7, 9, 4 if kind == "RGBA" else 3), np.uint8))
        image = small.resize((width, height)).convert(kind)
        if number % 5 == 2:
            path = folder / f"{number}.jpg"
            turned = Image.Exif()
            turned[0x0112] = int(rng.integers(1, 9))
            image.convert("RGB").save(path, exif=turned)
        else:
            path = folder / f"{number}.png"
            image.save(path)
        paths.append(path)
    return paths


def clips(folder: Path, count: int, seed: int = 0, rate: int = 16_000) -> list[Path]:
    """Clips of unusual lengths up to 2 s, some in stereo."""
    import soundfile

    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(count):
        length = int(rng.integers(700, 2 * rate))
        sound = rng.standard_normal((length, 2) if number % 3 == 1 else length).astype(np.float32) / 9
        paths.append(folder / f"{number}.{['wav', 'flac'][number % 2]}")
        soundfile.write(paths[-1], sound, rate)
    return paths


def videos(folder: Path, count: int) -> list[Path]:
    """Videos of unusual sizes, rates and lengths; one is rotated by its camera."""
    av = pytest.importorskip("av")
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        paths.append(folder / f"{number}.mp4")
        width, height, rate, frames = 2 * rng.integers(16, 60), 2 * rng.integers(16, 60), [8, 10, 25][number % 3], 0
        frames = int(rng.integers(9, 50))
        with av.open(str(paths[-1]), "w") as container:
            stream = container.add_stream("mpeg4", rate=Fraction(rate))
            stream.width, stream.height, stream.pix_fmt = int(width), int(height), "yuv420p"
            for _ in range(frames):
                pixels = rng.integers(0, 256, (4, 5, 3), np.uint8).repeat(height // 4 + 1, 0).repeat(width // 5 + 1, 1)
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels[:height, :width]), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return paths


def watched(path: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """All frames of a video, and its metadata."""
    import av

    with av.open(path) as container:
        rate = float(container.streams.video[0].average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    about = {"total_num_frames": len(frames), "fps": rate, "duration": len(frames) / rate}
    return torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous(), about


def heard(path: str) -> np.ndarray:
    import soundfile

    samples, _ = soundfile.read(path, dtype="float32")
    return samples.mean(axis=1) if samples.ndim == 2 else samples


def own(processor: Any, record: dict[str, Any], fps: float | None = None) -> Any:
    """Output of HuggingFace's own call for the record, with files read here. HuggingFace samples from all frames."""
    messages = copy.deepcopy(record["messages"])
    about: list[Any] = []
    for part in (part for message in messages for part in message["content"]):
        if part["type"] == "audio":
            part["audio"] = heard(part["audio"])
        elif part["type"] == "image":
            part["image"] = load_image(part["image"])
        elif part["type"] == "video":
            part["video"], told = watched(part["video"])
            about.append(told)
    said: dict[str, Any] = {"videos_kwargs": {"video_metadata": about}} if about else {}
    if about and (fps or processor.video_processor.do_sample_frames):
        said["do_sample_frames"] = True
    if about and fps:
        said["fps"] = fps
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=said
    )


def chat(rng: random.Random, paths: list[Path], kind: str = "image") -> dict[str, Any]:
    """A random record of typed messages, with media of this kind."""
    words = WORDS.split(" ")

    def text(least: int = 1) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(least, 12))) or "x"

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": [{"type": "text", "text": text()}]})
    for _ in range(rng.randint(1, 3)):
        content = [{"type": kind, kind: str(rng.choice(paths))} for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        content.insert(rng.randint(0, len(content)), {"type": "text", "text": text()})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text() + "x"}]})
    return {"messages": messages}
