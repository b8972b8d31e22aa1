"""A whole vision-language model in a folder, small and with random weights: to try the trainer without a download.

    python examples/small_checkpoint.py FOLDER

A LLaVA of a CLIP and a Llama with tokenizer (byte-level BPE), image processor (48 x 48 pixels) and chat template,
written by HuggingFace's own classes. Seconds on a CPU, 2 MB. It knows nothing: it is there to be trained. For real
work name the folder of a real checkpoint in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SIDE, PATCH = 48, 8
WORDS = "What is it? Describe the picture. It is a the of and in on with one two some USER ASSISTANT: \n"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] }}</s>{% endgeneration %}{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Any text can be written with it: its alphabet is the 256 bytes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([WORDS] * 9, trainer)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named, extra_special_tokens={"image_token": "<image>"})


def write(folder: str | Path) -> None:
    """The checkpoint, into `folder`."""
    torch.manual_seed(0)
    words = tokenizer()
    sizes = {"intermediate_size": 256, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, hidden_size=96, num_hidden_layers=4, image_size=SIDE, patch_size=PATCH)
    text = LlamaConfig(
        **sizes,
        hidden_size=96,
        num_hidden_layers=3,
        vocab_size=len(words),
        max_position_embeddings=256,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    image = words.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image, vision_feature_layer=-1)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    pixels = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(
        image_processor=pixels,
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/small_checkpoint.py FOLDER")
    write(sys.argv[1])
    print(f"{sys.argv[1]}: a LLaVA with random weights, its tokenizer, processor and chat template")
