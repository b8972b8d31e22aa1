"""`data.reading = "stream"` through the command line: two processes train on JSON lines of unknown number."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.balance import all_to_all_plan
from interlace.cli import main
from interlace.data import DecodeError, StreamLoader, StreamOptions
from interlace.data.streams.base import Reader
from interlace.data.streams.decode import DecodedReader
from interlace.data.workers.tasks import OfStream
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run import parallelize
from interlace.train.config.load import ConfigError, load
from interlace.train.data.feed import datasets
from interlace.train.data.producers import producers_of
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build, build_layout
from tests import forkserver
from tests.data.chat_families import pictures, trained
from tests.data.chat_faults import TEMPLATE
from tests.train.own_data import CONFIG

SAME = ("loss_metrics/global_avg_loss", "grad_norm", "data/moved(MiB)", "loss_metrics/held_out_loss")


def records(folder: Path, first: int, last: int) -> list[str]:
    """Chats with zero, one or two images."""
    lines = []
    for number in range(first, last):
        turns = [("human", f"<image>\nWhat is number {number}?"), ("gpt", f"It is a red cat, {number}.")]
        record: dict[str, Any] = {"conversations": [{"from": r, "value": v} for r, v in turns * (1 + number % 2)]}
        record["images"] = [
            f"pictures/{path.name}" for path in sorted((folder / "pictures").iterdir())[: 1 + number % 2]
        ]
        if number % 5 == 4:
            turn = [{"role": "user", "content": f"count {number}"}, {"role": "assistant", "content": "one two"}]
            record = {"messages": turn}
        lines.append(json.dumps(record))
    return lines


@pytest.fixture
def streamed(tmp_path: Path) -> Path:
    """A config of two files of 20 and 13 chats; one chat is broken and one names a missing image."""
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pictures(tmp_path / "pictures", 4)
    lines = records(tmp_path, 0, 20)
    lines[3], lines[6] = "{", lines[6].replace("pictures/", "gone/")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(records(tmp_path, 20, 33)))
    (tmp_path / "validation.jsonl").write_text("\n".join(records(tmp_path, 40, 46)))
    text = CONFIG.format(folder=tmp_path)
    for old, new in {
        f'train = ["{tmp_path}/train.jsonl"]': f'train = ["{tmp_path}/a.jsonl", "{tmp_path}/b.jsonl"]',
        'dataset = "chats"': 'dataset = "chats"\nreading = "stream"\nshuffle_buffer = 5',
        "steps = 2": "steps = 12",
        "ranks = 1": 'placement = "shared"\ndp = 2\ntimeout = 60.0\nthreads = 1',
        "samples = 3": "samples = 0",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "own.toml").write_text(text)
    return tmp_path


def train(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "interlace", "train", *arguments], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def curves(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in SAME if key in line} for line in lines]


def bytes_by_hand(config: str, steps: int) -> list[int]:
    """Bytes moved between ranks in each step: each rank that computes with a part of a sample and has not read it
    receives all of it. Text is two times 4 bytes per token, media are float32, each padded to 8 bytes.
    """
    read = load(config)
    tokenizer = tokenizer_of(read)
    model = build(read, tokenizer)
    parallel = parallelize(model, build_layout(read, model), timeout=60)
    stream, _ = datasets(read, model, tokenizer, say=lambda line: None)
    options = StreamOptions(timeout=60, microbatches=read.train.microbatches, chunks=read.chunks())
    order = [readable(Reader(stream, k, 2, seed=read.run.seed, buffer=5)) for k in range(2)]
    coming, result = [next(names) for names in order], []
    with StreamLoader(stream, parallel, 4, seed=read.run.seed, buffer=5, options=options) as loader:
        for _ in range(steps):
            batch = next(loader)
            samples, reader = batch.given.samples, list[int]()
            for sample in samples:
                assert coming[0] != coming[1] and sample.name in coming
                reader.append(coming.index(sample.name))
                coming[reader[-1]] = next(order[reader[-1]])
            due: set[tuple[int, int, str]] = set()
            for chunk in parallel.table(samples, options.microbatches, options.chunks).chunks:
                for stage in parallel.layout.pipelines(chunk.module)[chunk.replica].stages:
                    due |= {(int(i), rank, chunk.module) for i in chunk.samples for rank in stage.ranks}
            away = [(i, rank, module) for i, rank, module in due if reader[i] != rank]
            sizes = [part_bytes(samples[i], module) for i, _, module in away]
            plan = all_to_all_plan([reader[i] for i, _, _ in away], [rank for _, rank, _ in away], 2, sizes=sizes)
            assert plan.moved == sum(sizes) == batch.moved
            result.append(plan.moved)
    return result


def part_bytes(sample: Any, module: str) -> int:
    if module == LANGUAGE_MODEL:
        return 8 * len(sample)
    return sum(-(-4 * math.prod(item.shape) // 8) * 8 for item in sample.media.get(module, ()))


def readable(reader: Reader) -> Iterator[str]:
    """The names of the samples of a reader, epoch after epoch, without samples whose image is missing."""
    while True:
        while (sample := reader.next()) is not None:
            try:
                [item.data for items in sample.media.values() for item in items]
            except DecodeError:
                continue
            yield sample.name
        reader.advance()


@pytest.mark.slow
def test_two_processes_train_on_a_stream_and_go_on_bit_for_bit(streamed: Path) -> None:
    config = str(streamed / "own.toml")
    told = train(config)
    whole = (streamed / "runs" / "own" / "latest").resolve()
    result = curves(whole)
    assert [line["data/moved(MiB)"] * 2**20 for line in result] == bytes_by_hand(config, 12)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(line["tflops"] > 0 for line in lines)
    # Each was read by one of the two ranks; over three epochs possibly by both.
    listing = (whole / "left_out.txt").read_text().splitlines()
    assert len(listing) == 2 and "a.jsonl" in listing[0] and "a.jsonl" in listing[1]
    assert "chats/train, a stream: 2 records left out, e.g. " in told
    train(config, "--set=train.steps=7", "--set=train.schedule_steps=12")
    part = (streamed / "runs" / "own" / "latest").resolve()
    assert part != whole
    train("--resume", str(part), "--set=train.steps=12", "--set=data.workers=1")
    assert (part / "left_out.txt").read_text().splitlines() == listing
    again = curves(part)
    for step in (0, 5, 6, 7, 8, 9, 10, 11):  # the third epoch has begun by then
        assert again[step].items() >= {k: v for k, v in result[step].items() if k != SAME[3]}.items(), step


def test_loads_of_a_stream_cannot_be_drawn(streamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(streamed / "own.toml"), "--data", str(streamed / "loads.png")]) == 2
    assert "lengths of the run's first step, which of a stream nobody knows" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_plan_of_a_stream_accepts_few_validation_samples(streamed: Path) -> None:
    """The contents of a batch are unknown before the run. Validation samples represent it, for any number of them."""
    text = (streamed / "own.toml").read_text()
    for old, new in {
        'placement = "shared"\ndp = 2\n': 'layout = "auto"\nmax_ranks = 1\n',
        "steps = 12": "steps = 2",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (streamed / "auto.toml").write_text(text)
    told = train(str(streamed / "auto.toml"), "--set=train.batch_size=8")  # there are 6
    assert "simulated with 2 batches of the validation samples of chats" in told
    assert len(curves((streamed / "runs" / "own" / "latest").resolve())) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.validation=[]", "needs validation"),
        ("data.pack=true", "pack needs the lengths"),
        ("train.steps=none train.epochs=2", "how long a stream is nobody knows"),
        ("data.reading=random", "shuffle_buffer is a key of reading 'stream'"),
        ("data.reading=tape", "reading"),
        ("data.exchange_mb=0", "exchange_mb"),
        ("data.readers=0", "readers"),
        ("data.limit=5", "limit is for data that are read at random: a stream takes one source whole"),
        ("data.prefetch=4", "prefetch is of data that are read at random: a stream works one batch ahead"),
        ("data.drop_last=true", "a stream works one batch ahead, keeps nothing and leaves nothing out"),
        ("data.cache_gb=2.0", "cache_gb is of data that are read at random"),
        ("sources", "sources is for data that are read at random: a stream takes one source whole"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(streamed: Path, change: str, says: str) -> None:
    if "epochs" in change:
        text = (streamed / "own.toml").read_text().replace("steps = 12", "epochs = 2")
        (streamed / "own.toml").write_text(text)
        overrides = []
    elif change == "sources":
        text = (streamed / "own.toml").read_text()
        kept = [line for line in text.splitlines() if not line.startswith(("train = [", "validation = ["))]
        source = f'[[data.sources]]\nname = "a"\ntrain = ["{streamed}/a.jsonl"]\n'
        (streamed / "own.toml").write_text("\n".join([*kept, source]))
        overrides = []
    else:
        overrides = [change]
    with pytest.raises(ConfigError, match=says):
        load(str(streamed / "own.toml"), overrides)


@pytest.mark.parametrize("workers", ["auto", "0", "3"])
@pytest.mark.parametrize("reading", ["stream", "random"])
def test_who_decodes_does_not_depend_on_how_data_are_read(
    streamed: Path, monkeypatch: pytest.MonkeyPatch, reading: str, workers: str
) -> None:
    from interlace.data.workers import pool as pool
    from interlace.train.data.producers import workers_of

    monkeypatch.setattr(pool, "sensible", lambda ranks: 4)
    text = (streamed / "own.toml").read_text()
    if reading == "random":
        text = text.replace('reading = "stream"\nshuffle_buffer = 5', 'reading = "random"')
    (streamed / "own.toml").write_text(text)
    config = load(str(streamed / "own.toml"), [f"data.workers={workers}"])
    assert workers_of(config, 2) == {"auto": 4, "0": 0, "3": 3}[workers]


def test_workers_decode_chats_bit_identically_to_the_thread(streamed: Path) -> None:
    """The loader of a chat's images is sent to another process, with a copy of the stream."""
    config = load(str(streamed / "own.toml"), ["data.workers=1"])
    tokenizer = tokenizer_of(config)
    stream, _ = datasets(config, build(config, tokenizer), tokenizer, say=lambda line: None)
    forkserver.context()
    start = producers_of(config, streamed, 1)
    assert start is not None
    pool = start(OfStream(stream))
    try:
        thread, other = (
            DecodedReader(Reader(stream, 0, 1, buffer=5), producers, ahead=4, stopping=lambda: False, timeout=120.0)
            for producers in (None, pool)
        )
        count = 0
        while (expected := thread.next()) is not None:
            result = other.next()
            assert result is not None and result.name == expected.name
            assert torch.equal(result.input_ids, expected.input_ids)
            for name, items in expected.media.items():
                for item, like in zip(result.media[name], items, strict=True):
                    assert torch.equal(item.data, like.data) and item.about == like.about
                    count += 1
        assert other.next() is None and count > 20
        assert stream.read_items == 2 * sum("count" not in line for line in kept(streamed))
    finally:
        pool.close()


def test_stream_fingerprint_depends_on_file_content(streamed: Path) -> None:
    config = load(str(streamed / "own.toml"))
    tokenizer = tokenizer_of(config)
    model = build(config, tokenizer)

    def fingerprint() -> str:
        return str(datasets(config, model, tokenizer, say=lambda line: None)[0].fingerprint())

    file, first = streamed / "b.jsonl", fingerprint()
    text, about = file.read_text(), file.stat()
    assert fingerprint() == first
    file.write_text(text.replace("red cat, 32", "tan cat, 32"))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size and fingerprint() != first


def kept(folder: Path) -> list[str]:
    """The valid records of the training files."""
    lines = [line for name in ("a", "b") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [line for line in lines if line != "{" and "gone/" not in line]


def test_the_shards_of_lines_have_every_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any pieces, blank lines and line endings; the oracle reads the file whole."""
    from interlace.data.chats.files import records as chats_files

    for number, text in enumerate(
        (b"\xef\xbb\xbf{1}\n\n{22}\r\n{333}", b"{1}\n" * 9, b"", b"\n\n", b"{" + b"a" * 50 + b"}\n{2}\n")
    ):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(text)
        whole = [(raw.line, raw.offset) for raw in chats_files.records(path, tmp_path)]
        for size in (1, 3, 5, 100):
            monkeypatch.setattr(chats_files, "PIECE", size)
            pieces = chats_files.pieces(path)
            result = [raw for piece in pieces for raw, _ in chats_files.numbered(piece, tmp_path) if raw is not None]
            result = [(raw.line, raw.offset) for raw in result]
            assert result == whole, (number, size)
