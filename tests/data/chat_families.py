"""Processors of several families with tokenizers trained here, and random chats with pictures of odd sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from interlace.data import chats_load

WORDS = (
    "the cat sits on a red mat while it rains, and seven birds sing: \u00e9t\u00e9, \u732b, \U0001f426! What is this? "
    "A house with 2 doors. Describe the picture. user assistant system Assistant User\n\n"
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}{% endfor %}<|im_end|>"
    "{% endgeneration %}\n"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
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
    "{% else %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{% if message['role'] != 'assistant' %}"
    "{{ part['text'] + ' ' }}{% else %}{% generation %}{{ part['text'] + '</s>' }}{% endgeneration %}"
    "{% endif %}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Family(NamedTuple):
    processor: Any
    placeholder: int
    """The id that stands for a picture's features."""


def trained(named: dict[str, str], more: tuple[str, ...] = (), *, size: int = 400) -> Any:
    """A byte-level BPE tokenizer with these special tokens, the named ones as attributes."""
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


def _loaded(folder: Path, name: str, tokenizer: Any, image_processor: Any, template: str, **said: Any) -> Any:
    """A processor as its folder has it, loaded by the code under test."""
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **said}))
    (folder / "chat_template.jinja").write_text(template)
    return chats_load.load_processor(folder)


def llava(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>"})
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    said = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return Family(
        _loaded(folder, "LlavaProcessor", tokenizer, pixels, LLAVA, **said), tokenizer.convert_tokens_to_ids("<image>")
    )


def llava_next(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>"})
    pixels = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    )
    said = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    made = _loaded(folder, "LlavaNextProcessor", tokenizer, pixels, LLAVA, **said)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def llava_onevision(folder: Path) -> Family:
    tokenizer = trained({"image_token": "<image>", "video_token": "<video>"}, ("<|im_start|>", "<|im_end|>"))
    pixels = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    )
    said = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    template = CHATML.replace("IMAGE", "<image>")
    made = _loaded(folder, "LlavaOnevisionProcessor", tokenizer, pixels, template, **said)
    return Family(made, tokenizer.convert_tokens_to_ids("<image>"))


def qwen2_vl(folder: Path) -> Family:
    tokenizer = trained(
        {}, ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
    pixels = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12})
    template = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    made = _loaded(folder, "Qwen2VLProcessor", tokenizer, pixels, template)
    return Family(made, tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def gemma3(folder: Path, **said: Any) -> Family:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = trained(named, ("<start_of_turn>", "<end_of_turn>"))
    pixels = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **said)
    made = _loaded(folder, "Gemma3Processor", tokenizer, pixels, GEMMA, image_seq_length=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<image_soft_token>"))


def idefics3(folder: Path) -> Family:
    more = ("<|im_start|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokenizer = trained({}, (*more, *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))), size=460)
    pixels = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    made = _loaded(folder, "Idefics3Processor", tokenizer, pixels, IDEFICS, image_seq_len=4)
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
    template = CHATML.replace("IMAGE", "<IMG_CONTEXT>\n")
    made = _loaded(folder, "InternVLProcessor", tokenizer, pixels, template, image_seq_length=4)
    return Family(made, tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"))


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
    """Pictures of odd sizes and kinds: some grey, some with transparent parts, some turned by their camera."""
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


def chat(rng: random.Random, paths: list[Path]) -> dict[str, Any]:
    """A random record of typed messages."""
    words = WORDS.split(" ")

    def text(least: int = 1) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(least, 12))) or "x"

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": [{"type": "text", "text": text()}]})
    for _ in range(rng.randint(1, 3)):
        content = [{"type": "image", "image": str(rng.choice(paths))} for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        content.insert(rng.randint(0, len(content)), {"type": "text", "text": text()})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text() + "x"}]})
    return {"messages": messages}
