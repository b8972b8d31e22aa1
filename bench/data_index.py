"""Data index at a million samples: building the index, preparing chats, opening both, and memory during training.

    python -m bench.data_index [--samples 1000000] [--folder FOLDER] [--step STEP] [--out bench/results/data_index.json]

The data are JSON lines: a question about a picture and an answer of 3 to 40 words each. The records state the sizes of
their pictures (data.sizes = "records"; there are no picture files). Steps:

- index: built by one process, and by one process per core.
- tokens: texts tokenised with a BPE of 400 words, in batches and one by one, and the first 50,000 records prepared.
- read (in a separate process): opening, then shuffled batches, plain and packed into rows; resident memory before and
  after. It reads --samples prepared samples, which repeat those 50,000: preparing a million takes minutes, and neither
  opening nor memory depends on the texts.

Each step adds its figures to the report. The data and the derived files stay in the folder for the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import command, machine, versions, write_json

WORDS = "the a red green small large animal sits on under beside tree house river what is it which of these looks like"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS = ("index", "tokens", "read")
READ = 50_000  # samples that training reads
PREPARED = 50_000  # records that are prepared
SINGLE = 4_000  # samples that are tokenised one by one, and in batches for comparison


def write_data(path: Path, samples: int) -> None:
    """The JSON lines, identical for the same number of samples."""
    rng, words = random.Random(0), WORDS.split()
    temporary = path.with_suffix(".part")
    with open(temporary, "w", encoding="utf-8") as file:
        for number in range(samples):
            asked = " ".join(rng.choices(words, k=8))
            said = " ".join(rng.choices(words, k=rng.randint(3, 40)))
            turns = [{"role": "user", "content": f"<image>{asked}"}, {"role": "assistant", "content": said}]
            record = {"messages": turns, "images": [f"pictures/{number % 1000:03d}/{number:07d}.jpg"]}
            record |= {"width": rng.randint(200, 1200), "height": rng.randint(200, 1200)}
            file.write(json.dumps(record) + "\n")
    os.replace(temporary, path)


def chat_format() -> Any:
    """A tokenizer of 400 words and an encoder of pictures of at most 64 patches of 16 x 16."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from interlace.data.chats.encoding.tokens import TokenizerFormat
    from interlace.modalities.image import ImageSpec

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [WORDS] * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=special)
    return TokenizerFormat(
        tokenizer,
        TEMPLATE,
        name="the template",
        tags={"vision": "<image>"},
        specs={"vision": ImageSpec(16, 64)},
        tokens={"vision": lambda shape: shape[1] * shape[2] // 256},
    )


def rules() -> Any:
    """Size rules: sizes from the records."""
    from interlace.data.chats.files.sources import Rules

    return Rules(decode=False, sizes="records")


def index(data: Path, folder: Path) -> dict[str, Any]:
    """Seconds and samples per second of rebuilding the index."""
    from interlace.data.chats.files import index as chats_index

    result: dict[str, Any] = {}
    for processes in sorted({1, len(os.sched_getaffinity(0))}):
        cache = folder / "cache" / "chats"
        shutil.rmtree(cache / "index", ignore_errors=True)
        began = time.perf_counter()
        made = chats_index.load([data], rules(), cache / "media", processes=processes, say=lambda line: None)
        seconds = time.perf_counter() - began
        result[f"processes_{processes}"] = {"seconds": seconds, "samples_per_second": len(made) / seconds}
    began = time.perf_counter()
    assert len(chats_index.load([data], rules(), cache / "media")) == len(made)
    result["open_seconds"] = time.perf_counter() - began
    result["bytes"] = sum(file.stat().st_size for file in made.folder.glob("pieces/*"))
    return result


def tokens(data: Path, folder: Path) -> dict[str, Any]:
    """Seconds of preparing the chats from the index, and of tokenising some in batches and one by one."""
    from itertools import islice

    from interlace.data.chats.examine import BLOCK
    from interlace.data.chats.files import records as chats_files
    from interlace.data.chats.files.sources import chat_of
    from interlace.data.chats.store import prepare

    chats = chat_format()
    result: dict[str, Any] = {}
    read = [chat_of(raw, rules()) for raw in islice(chats_files.records(data, folder), SINGLE)]
    pairs = [(chat, [part.stated for part in chat.media]) for chat in read]
    chats.encode_many(pairs[:BLOCK])
    for name in ("in_batches", "one_by_one"):
        began = time.perf_counter()
        for start in range(0, len(pairs), BLOCK):
            if name == "in_batches":
                chats.encode_many(pairs[start : start + BLOCK])
            else:
                for chat, sizes in pairs[start : start + BLOCK]:
                    chats.encode(chat, sizes)
        result[f"tokenised_{name}_per_second"] = len(pairs) / (time.perf_counter() - began)
    some = folder / "some.jsonl"
    with open(data, "rb") as file:
        some.write_bytes(b"".join(islice(file, PREPARED)))
    shutil.rmtree(folder / "some", ignore_errors=True)
    began = time.perf_counter()
    store = prepare([some], chats, rules(), folder / "some")
    seconds = time.perf_counter() - began
    repeat(store.folder, folder / "repeated", -(-sum(1 for _ in open(data, "rb")) // len(store)))
    return result | {"prepared": len(store), "prepared_per_second": len(store) / seconds}


def repeat(one: Path, many: Path, times: int) -> None:
    """Create the folder of prepared chats `many` by repeating the samples of `one`."""
    from interlace.data.chats.store import READ as FILES
    from interlace.data.chats.store import ROW

    shutil.rmtree(many, ignore_errors=True)
    shutil.copytree(one, many)
    record, whole = json.loads((one / "store.json").read_text()), np.fromfile(one / "samples.bin", ROW)
    rows, number = np.tile(whole, times), np.repeat(np.arange(times), len(whole))
    rows["start"] += number * int(whole["tokens"].sum())
    rows["line"] += number * record["sizes"]["items.jsonl"]
    rows.tofile(many / "samples.bin")
    for name in FILES:
        (many / name).write_bytes((one / name).read_bytes() * times)
        record["sizes"][name] *= times
    record["checksum"] = zlib.crc32(rows.view(np.uint8))
    (many / "store.json").write_text(json.dumps(record))


def resident() -> float:
    """Resident memory of this process in MB, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def read_here(data: Path, folder: Path) -> dict[str, Any]:
    """Step `read`, in this process."""
    from interlace.data import Loader, MixedDataset, Part, ReadAhead, RowLoader
    from interlace.data.chats.dataset import ChatDataset
    from interlace.data.chats.files import index as chats_index
    from interlace.data.chats.store import _load

    chats = chat_format()
    np.random.default_rng(0).permutation(10)
    before = resident()
    began = time.perf_counter()
    opened = chats_index.load([data], rules(), folder / "cache" / "chats" / "media")
    result: dict[str, Any] = {"open_index_seconds": time.perf_counter() - began}
    assert len(opened) == opened.totals["records"]
    began = time.perf_counter()
    store = _load(folder / "repeated", rules(), chats)
    result["open_prepared_seconds"] = time.perf_counter() - began
    assert store is not None
    result["samples"] = len(store)
    dataset = MixedDataset([Part("all", ChatDataset(store, chats, np.arange(len(store)), "train"))])
    most = int(store.lengths.max())
    ahead = ReadAhead(prefetch=0, wanted=lambda batch: [])
    makers = (
        ("batches", lambda: Loader(dataset, 64, ahead=ahead)),
        ("rows", lambda: RowLoader(dataset, 4, 16 * most, ahead=ahead)),
    )
    for name, make in makers:
        began = time.perf_counter()
        loader = make()
        batch = next(loader)
        first = time.perf_counter() - began
        count, most_resident = 0, resident()
        began = time.perf_counter()
        while count < min(READ, len(store)):
            batch = next(loader)
            count += sum(map(len, batch)) if name == "rows" else len(batch)
            most_resident = max(most_resident, resident()) if count % 37 == 0 else most_resident
        seconds = time.perf_counter() - began
        most_resident = max(most_resident, resident())
        result[name] = {
            "first_batch_seconds": first,
            "samples_read": count,
            "samples_per_second": count / seconds,
            "resident_growth_mb": most_resident - before,
        }
        state = loader.state_dict()
        result[name]["state_bytes"] = len(json.dumps(state))
        loader.close()
        del loader
    result["resident_before_mb"] = before
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--folder", type=Path, default=Path("build/data_index"))
    options.add_argument("--step", choices=[*STEPS, "data", "all"], default="all")
    options.add_argument("--out", type=Path, default=Path("bench/results/data_index.json"))
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    data = (given.folder / f"chats-{given.samples}.jsonl").absolute()
    if not data.exists():
        write_data(data, given.samples)
    if given.inside:
        print(json.dumps(read_here(data, given.folder)))
        return
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    if report.get("samples") != given.samples:
        report = {}
    about = {"benchmark": "data_index", "command": command("data_index", []), "machine": machine()}
    report |= about | {"versions": versions(), "samples": given.samples, "data_bytes": data.stat().st_size}
    for step in STEPS if given.step == "all" else [given.step]:
        if step == "index":
            report[step] = index(data, given.folder)
        elif step == "tokens":
            report[step] = report.get(step, {}) | tokens(data, given.folder)
        elif step == "read":
            again = [sys.executable, "-m", "bench.data_index", "--inside", "--samples", str(given.samples)]
            output = subprocess.run([*again, "--folder", str(given.folder)], capture_output=True, text=True, check=True)
            report[step] = json.loads(output.stdout.splitlines()[-1])
    if given.step != "data":
        write_json(given.out, report)
    print(json.dumps({name: report.get(name) for name in STEPS}, indent=1))


if __name__ == "__main__":
    main()
