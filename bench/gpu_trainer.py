"""`interlace train` on one GPU against HuggingFace's Trainer and a plain loop: the same model, data, rows and weights.

    interlace    `interlace train`: rows of packed samples, bitfield attention
    plain        a loop as users write it: SDPA, each row's samples padded to the longest of them
    hf sdpa      HuggingFace's Trainer over the same padded batches
    hf flex      HuggingFace's Trainer over packed rows, with FlexAttention in the language model

    2B           SigLIP so400m and a language model like Qwen2.5-1.5B, all trained
    8B lora      the same encoder, frozen, and one like Llama-3-8B with LoRA, frozen weights in bf16
    8B offload   all of it trained, AdamW's state in host memory (interlace alone: the others have no such optimizer)

The others' media are causal, as in HuggingFace's models. In interlace the tokens of a picture see each other in both
directions, a few pairs more, so first losses agree only roughly. Weights are random. Pictures of odd sizes are written
first, as files with chats about them (JSONL), and read like a user's files. bf16 under autocast, rows of 16,384 tokens,
layers recomputed, AdamW (fused). Every contender trains in its own process. Figures are medians over its steps after
warm-up. MFU uses one FLOP count for all, that of `interlace.estimate.step_flops`. The vision towers of the others batch
pictures of one size, as HuggingFace's own classes do. Here hardly two pictures of a row have the same size, so theirs
run nearly picture by picture. This is part of the measured difference, and would be smaller if users resized all
pictures to one size. Cases that do not fit the GPU's memory are left out, with the reason.

    python -m bench.gpu_trainer [--cases 2B "8B lora"] [--contenders interlace ...] [--out FILE]
    python -m bench.gpu_trainer --short        interlace alone, 2B, 6 steps of one row; weights are drawn on the GPU
    python -m bench.gpu_trainer --rehearse     the same code at toy sizes, on the CPU
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import SiglipVisionConfig

from bench.measure import command, device, machine, peak_bytes, reason, versions, write_json
from bench.trainer import ROOT, InRows, Plain
from interlace.train import rank
from interlace.train.config import load as configs
from interlace.train.config.sections import Config
from interlace.train.data.feed import Batch, Feed, datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.launch import launcher
from interlace.train.models import random_weights as weights
from interlace.train.models.build import build, materialize
from interlace.train.models.tuning import rates
from interlace.train.observers.saving import Saving
from interlace.train.optim import Optimizer
from interlace.train.report.flops import Meter, peak_of
from interlace.train.report.metrics import LOSS

CONTENDERS = ("interlace", "plain", "hf sdpa", "hf flex")
PICTURES = "pictures of odd sizes: all but interlace run the vision tower nearly picture by picture"
WARM = 3  # steps that are not counted
WORDS = (
    "the a small large red old picture of house bird with two windows over water in front behind and left seen".split()
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Shape(NamedTuple):
    """Sizes of a case. words, sides: (least, most) of a sample. gib: least GPU memory that the case needs."""

    vision: dict[str, Any]
    architecture: str
    language: dict[str, Any]
    row: int
    words: tuple[int, int]
    sides: tuple[int, int]
    settings: tuple[str, ...]
    gib: float
    only: tuple[str, ...] = CONTENDERS


SO400M = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14,
}  # fmt: skip
if hasattr(SiglipVisionConfig(), "vision_use_head"):  # not in transformers 5.17; the pooling head is not used
    SO400M["vision_use_head"] = False
QWEN = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
LORA = ("train.lora.rank=16", 'train.frozen_dtype="bf16"', "model.vision.freeze=true")
OFFLOAD = ("train.offload_optimizer=true",)
REAL: dict[str, Any] = {"row": 16384, "words": (60, 500), "sides": (200, 900)}
CASES = {
    # Weights, gradients and moments in fp32, and the saved tensors of a recomputed row.
    "2B": Shape(SO400M, "Qwen2ForCausalLM", QWEN, settings=(), gib=60, **REAL),
    "8B lora": Shape(SO400M, "LlamaForCausalLM", LLAMA, settings=LORA, gib=45, **REAL),
    "8B offload": Shape(SO400M, "LlamaForCausalLM", LLAMA, settings=OFFLOAD, gib=100, only=("interlace",), **REAL),
}
TOY_VISION = SO400M | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "vocab_size": 400,
}  # fmt: skip
TOYS: dict[str, Any] = {"row": 300, "words": (5, 20), "sides": (20, 90)}
REHEARSED = {
    "2B": Shape(TOY_VISION, "Qwen2ForCausalLM", TOY | {"tie_word_embeddings": True}, settings=(), gib=0, **TOYS),
    "8B lora": Shape(TOY_VISION, "LlamaForCausalLM", TOY, settings=LORA, gib=0, **TOYS),
}


# ---------------------------------------------------------------------- data and config


def write_data(folder: Path, shape: Shape, samples: int) -> None:
    """A tokenizer, and chats about pictures of odd sizes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["</s>", "<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder / "tokenizer")
    rng, chance = random.Random(0), np.random.default_rng(0)
    records = []
    for number in range(samples):
        small = Image.fromarray(chance.integers(0, 256, (12, 16, 3), np.uint8))
        small.resize((rng.randint(*shape.sides), rng.randint(*shape.sides))).save(folder / f"{number}.jpg")
        answer = " ".join(rng.choices(WORDS, k=rng.randint(*shape.words)))
        turns = [("user", "<image>\nWhat is seen?"), ("assistant", answer)]
        messages = [{"role": role, "content": text} for role, text in turns]
        records.append({"messages": messages, "images": [f"{number}.jpg"]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def config_of(folder: Path, shape: Shape, steps: int, microbatches: int) -> Config:
    """The config of a short run: no validation, no page, every step logged."""
    table: dict[str, Any] = {
        "run": {"name": "bench", "folder": str(folder / "runs"), "deterministic": False},
        "model": {
            "vision": {"architecture": "SiglipVisionModel", "downsample": 4, "config": shape.vision},
            "language_model": {"architecture": shape.architecture, "config": shape.language},
        },
        "data": {
            "dataset": "chats", "train": [str(folder / "chats.jsonl")], "tokenizer": str(folder / "tokenizer"),
            "cache": str(folder / "cache"), "max_tokens": shape.row, "pack": True, "decode_first": False,
        },
        "train": {
            "steps": steps, "batch_size": microbatches, "microbatches": microbatches, "warmup_steps": 1, "lr": 1e-5,
            "precision": "bf16", "activation_checkpointing": "full", "validate_every": 0, "validation_samples": 1,
        },
        "parallel": {"ranks": 1},
        "checkpoint": {"every": 0},
        "log": {"every": 1, "trackers": [], "trace_step": 0, "samples": 0, "accuracy_samples": 0},
    }  # fmt: skip
    return configs.from_table(table, list(shape.settings))


# ---------------------------------------------------------------------- the other loops


class Other:
    """A contender in this process: model, data and counts as in `interlace train`, without its runtime."""

    def __init__(self, name: str, config: Config) -> None:
        self.config, self.device = config, device()
        if self.device.type == "cpu":
            torch.set_num_threads(launcher.default_threads(1))
        torch.manual_seed(config.run.seed)
        tokenizer = tokenizer_of(config)
        self.mllm = materialize(build(config, tokenizer), seed=config.run.seed, device=self.device)
        splits = datasets(config, self.mllm, tokenizer)[:2]
        size, row = config.train.batch_size, config.data.max_tokens
        self.feed = Feed(*splits, batch_size=size, seed=config.run.seed, validation_samples=1, row_tokens=row)
        self.meter = Meter(self.mllm, [0.0], recompute=config.train.recompute)
        # Compiling FlexAttention takes a CPU minutes: the rehearsal uses SDPA on the same rows.
        flex = "flex_attention" if self.device.type == "cuda" else "sdpa"
        self.loss = InRows(self.mllm, flex) if name == "hf flex" else Plain(self.mllm)
        for module in (self.mllm.language_model, *(encoder.module for encoder in self.mllm.encoders.values())):
            if config.train.recompute and any(p.requires_grad for p in module.parameters()):
                module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.steps: list[dict[str, Any]] = []

    def note(self, batch: Batch, began: float, data: float, loss: float) -> None:
        """Record a step that ends now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self.meter.add(batch.samples, None, seconds)
        step = {"loss": loss, "tokens": batch.tokens, "seconds": seconds, "data_seconds": data}
        self.steps.append(step | {"tflops": self.meter.metrics()["tflops"]})


def train_plain(other: Other) -> None:
    """Training loop in one process."""
    config, parameters = other.config, [p for p in other.mllm.parameters() if p.requires_grad]
    optimizer = Optimizer(other.mllm.named_parameters(), config, rates(config, other.mllm))
    for step in range(1, config.train.last_step + 1):
        began = time.perf_counter()
        batch = other.feed.next()
        data, total = time.perf_counter() - began, 0.0
        rows = batch.rows or [batch.samples]
        for row in rows:
            with torch.autocast(other.device.type, dtype=torch.bfloat16):
                loss = other.loss(row) / len(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()  # type: ignore[assignment]
        nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)
        optimizer.step(step)
        other.note(batch, began, data, float(total))


class _Wrapped(nn.Module):
    """Model for HuggingFace's Trainer: returns a loss for a row of samples."""

    def __init__(self, other: Other) -> None:
        super().__init__()
        self.mllm, self.loss = other.mllm, other.loss

    def forward(self, samples: Sequence[Any]) -> dict[str, Any]:
        return {"loss": self.loss(samples)}


def train_hf(other: Other, folder: Path) -> None:
    """Training by HuggingFace's Trainer; its gradient accumulation takes a step's rows."""
    try:
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.utils import is_accelerate_available
    except ImportError as error:
        raise SystemExit(f"HuggingFace's Trainer cannot be imported: {error}") from None
    if not is_accelerate_available():
        raise SystemExit("HuggingFace's Trainer needs accelerate: pip install accelerate")
    train, waiting, batches = other.config.train, [0.0], list[Batch]()

    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            while True:
                began = time.perf_counter()
                batch = other.feed.next()
                waiting[0] += time.perf_counter() - began
                batches.append(batch)
                yield from batch.rows or [batch.samples]

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_log(self, _: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if "loss" in (logs or {}):
                number = len(other.steps)
                other.note(batches[number], self.began, waiting[0], float(logs["loss"]))
                self.began, waiting[0] = time.perf_counter(), 0.0

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=train.last_step,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=train.microbatches,
        learning_rate=train.lr,
        lr_scheduler_type="constant",
        max_grad_norm=train.clip_norm,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        optim="adamw_torch_fused",
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=other.device.type == "cpu",
        accelerator_config={"dispatch_batches": False},
    )

    def first(rows: Sequence[Any]) -> dict[str, Any]:
        return {"samples": rows[0]}

    made = Trainer(
        model=_Wrapped(other), args=arguments, train_dataset=Rows(), data_collator=first, callbacks=[Watch()]
    )
    made.train()


def train_interlace(config: Config, source: str, *, drawn_there: bool = False) -> None:
    """`interlace train` in this process, without the checkpoint at the end.

    drawn_there: draw random weights on the device; the CPU's generator takes seconds per billion.
    """

    def on_the_device(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device=device(), requires_grad=False)

    with contextlib.ExitStack() as changed:
        changed.enter_context(mock.patch.object(Saving, "save", lambda self: None))
        if drawn_there:
            changed.enter_context(mock.patch.object(weights, "_on_the_host", on_the_device))
        if status := rank.run(config, source=source):
            raise RuntimeError(f"interlace train ended with status {status}")


def logged(folder: Path) -> dict[str, Any]:
    """Log of a run below this folder: its steps, and its peak memory."""
    [metrics] = [each for each in folder.glob("*/*/metrics.jsonl") if not each.parent.is_symlink()]
    steps, most = [], 0.0
    for line in map(json.loads, metrics.read_text().splitlines()):
        data = line["time_metrics/data_loading(s)"]
        seconds = line["time_metrics/end_to_end(s)"]
        step = {"loss": line[LOSS], "tokens": line["throughput(tps)"] * seconds, "seconds": seconds}
        steps.append(step | {"data_seconds": data, "tflops": line["tflops"], "hfu": line.get("hfu(%)")})
        most = max(most, line["memory/max_active(GiB)"])
    return {"steps": steps, "peak_bytes": int(most * 2**30)}


def run_loop(name: str, config: Config, folder: Path) -> dict[str, Any]:
    """Result of a contender in this process: its steps, and its peak memory."""
    if name == "interlace":
        train_interlace(config, str(folder))
        return logged(Path(config.run.folder))
    other = Other(name, config)
    try:
        train_plain(other) if name == "plain" else train_hf(other, folder)
    finally:
        other.feed.close()
    cuda = other.device.type == "cuda"
    return {"steps": other.steps, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak_bytes()}


# ---------------------------------------------------------------------- processes


def run(name: str, config: Config, folder: Path) -> dict[str, Any]:
    """Run a contender in a separate process. Raises RuntimeError with the end of its output."""
    path = folder / "config.toml"
    path.write_text(configs.dumps(config))
    given = ["bench.gpu_trainer", "--loop", name, str(path)]
    done = subprocess.run([sys.executable, "-m", *given], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarised(ran: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """The medians of a contender's steps after warm-up."""
    steps = ran["steps"][WARM:] or ran["steps"]

    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(step) for step in steps)

    row = {
        "tokens_per_s": median(lambda step: step["tokens"] / step["seconds"]),
        "seconds": median(lambda step: step["seconds"]),
        "tflops": median(lambda step: step["tflops"]),
        "data_wait": median(lambda step: step["data_seconds"] / step["seconds"]),
        "peak_gib": ran["peak_bytes"] / 2**30,
        "first_loss": ran["steps"][0]["loss"],
    }
    return row | ({} if peak is None else {"mfu": row["tflops"] / peak})


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes")
    parser.add_argument("--short", action="store_true", help="interlace alone, 2B, 6 steps of one row, in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_trainer.json")
    parser.add_argument("--loop", nargs=2, metavar=("CONTENDER", "CONFIG"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.loop:
        config = configs.load(options.loop[1])
        print(json.dumps(run_loop(options.loop[0], config, Path(options.loop[1]).parent / "hf")))
        return None
    if options.short:
        options.cases, options.contenders, options.steps, options.microbatches = ["2B"], ["interlace"], 6, 1
    here, cases = device(), REHEARSED if options.rehearse else CASES
    gpu = torch.cuda.get_device_properties(here) if here.type == "cuda" else None
    if gpu is None and not options.rehearse:
        raise SystemExit("gpu_trainer measures on a GPU, and there is none: --rehearse runs its code on the CPU")
    peak = None if gpu is None else peak_of(gpu.name, "bf16")
    report: dict[str, Any] = {
        "benchmark": "gpu_trainer", "command": command("gpu_trainer", argv), "rehearsal": options.rehearse,
        "machine": machine(here), "versions": versions("torch", "transformers", "accelerate", "peft", "interlace"),
        "pictures": PICTURES,
        "peak_tflops": peak, "microbatches": options.microbatches, "steps": options.steps, "cases": {},
    }  # fmt: skip
    for case in [each for each in options.cases if each in cases]:
        shape, rows = cases[case], {}
        if gpu is not None and gpu.total_memory < shape.gib * 2**30:
            had = gpu.total_memory / 2**30
            report["cases"][case] = {"skipped": f"takes about {shape.gib:g} GiB, and {gpu.name} has {had:.0f}"}
            continue
        with tempfile.TemporaryDirectory() as data:
            tokens = options.steps * options.microbatches * shape.row
            least = sum(shape.words) // 2 + 30  # average words of a sample without its picture
            began = time.perf_counter()
            write_data(Path(data), shape, 20 + tokens // least * 12 // 10)
            print(f"{case}: data written in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            for name in (each for each in options.contenders if each in shape.only):
                with tempfile.TemporaryDirectory() as folder:
                    config = config_of(Path(data), shape, options.steps, options.microbatches)
                    config = config.model_copy(
                        update={"run": config.run.model_copy(update={"folder": f"{folder}/runs"})}
                    )
                    try:
                        if options.short:
                            train_interlace(config, "the short run", drawn_there=True)
                            ran = logged(Path(config.run.folder))
                        else:
                            ran = run(name, config, Path(folder))
                    except RuntimeError as error:
                        if options.short:
                            raise
                        rows[name] = {"failed": reason(error)}
                    else:
                        rows[name] = summarised(ran, peak)
                print(f"{case}, {name}: {rows[name]}", file=sys.stderr, flush=True)
        report["cases"][case] = rows
        write_json(options.out, report)
    print_table(report)
    return report


def print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['pictures']}")
    for case, rows in report["cases"].items():
        print(f"\n{case}" + (f": {rows['skipped']}" if "skipped" in rows else ""))
        for name, row in rows.items() if "skipped" not in rows else ():
            if "failed" in row:
                print(f"  {name:10} {row['failed']}")
                continue
            share = f"{100 * row['mfu']:5.1f} % MFU" if "mfu" in row else f"{row['tflops']:.3g} TFLOP/s"
            print(
                f"  {name:10} {row['tokens_per_s']:9,.0f} tokens/s  {row['seconds']:7.3f} s  {share}  "
                f"{row['peak_gib']:6.1f} GiB  data {100 * row['data_wait']:.0f} %"
            )


if __name__ == "__main__":
    main()
