"""Use 3, the trainer: made-up pictures, chats about them, a small model, `interlace train`, `export`, and back.

    python examples/train_and_export.py [FOLDER]

Under a minute on a CPU. It writes into FOLDER (a new one by default): pictures/ and chats.jsonl, tokenizer/,
config.toml, runs/ and exported/. For pictures of your own change `train` and `tokenizer` in the config.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from interlace.cli import main
from interlace.model import MultimodalModel

COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("disc", "square")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONFIG = """
[run]
name = "shapes"
folder = "{folder}/runs"

[model.vision]
architecture = "SiglipVisionModel"
downsample = 4

[model.vision.config]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
image_size = 32
patch_size = 8

[model.language_model]
architecture = "LlamaForCausalLM"

[model.language_model.config]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 128

[data]
dataset = "chats"
train = ["{folder}/chats.jsonl"]
held_out = 0.2
tokenizer = "{folder}/tokenizer"
cache = "{folder}/cache"

[train]
steps = 100
batch_size = 8
lr = 3e-3
warmup_steps = 5
validate_every = 0

[parallel]
threads = 1

[log]
every = 10
trace_step = 0
samples = 4
max_new_tokens = 12
"""


def write_data(folder: Path, count: int = 40) -> list[str]:
    """`count` pictures of a coloured shape, a chat about each; returns what was written in them."""
    draw = random.Random(0)
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number in range(count):
        colour, shape = draw.choice(COLOURS), draw.choice(SHAPES)
        picture = Image.new("RGB", (32, 32), "white")
        left, top, size = draw.randint(2, 8), draw.randint(2, 8), draw.randint(14, 20)
        paint = ImageDraw.Draw(picture)
        (paint.ellipse if shape == "disc" else paint.rectangle)((left, top, left + size, top + size), fill=colour)
        name = f"pictures/{number}.png"
        picture.save(folder / name)
        question = {"role": "user", "content": "<image>What is it?"}
        answer = {"role": "assistant", "content": f"A {colour} {shape}."}
        lines.append(json.dumps({"messages": [question, answer], "images": [name]}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return lines


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE tokenizer trained on `texts`, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")


def run(*arguments: str | Path) -> None:
    """`interlace` with these arguments."""
    command = [str(argument) for argument in arguments]
    print(f"\n$ interlace {shlex.join(command)}", flush=True)
    if code := main(command):
        sys.exit(code)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="shapes-"))
    write_tokenizer(folder, write_data(folder))
    config = folder / "config.toml"
    config.write_text(CONFIG.format(folder=folder))

    run("data", "check", config, "--out", folder / "data.html")
    run("train", config)
    run_folder = folder / "runs" / "shapes" / "latest"
    run("generate", run_folder, "--image", folder / "pictures" / "0.png", "--text", "What is it?")
    run("export", run_folder, folder / "exported")

    model = MultimodalModel.from_pretrained(folder / "exported")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{folder / 'exported'} loads again: {parameters:,} parameters, all finite:", end=" ")
    print(all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()))
    print(f"look at {folder / 'data.html'} and {run_folder / 'report.html'}")
