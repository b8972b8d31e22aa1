"""Metrics of a run and metrics.jsonl. Trackers, the terminal and the page show the same numbers.

Names follow torchtitan where it has one (``loss_metrics/global_avg_loss``, ``throughput(tps)``,
``time_metrics/data_loading(%)``, ``memory/max_active(GiB)``). docs/watching-a-run.md lists all of them.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from pydantic import BaseModel, ConfigDict

from interlace import _device
from interlace._files import write_whole
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run.tables.table import Lengths
from interlace.schedule import StepTable
from interlace.schedule.actions import COMPUTE
from interlace.simulate import Timeline
from interlace.train.report.trackers import Trackers
from interlace.train.runfolder import json_lines

if TYPE_CHECKING:
    from interlace.run.parallel_model import ParallelModel

LOSS = "loss_metrics/global_avg_loss"
HELD_OUT = "loss_metrics/held_out_loss"
TOKENS = "throughput(tps)/"  # + module
BUSY = "busy(%)/"  # + module
SHARE = "data/share(%)/"  # + source; share of the samples
TOKEN_SHARE = "data/token_share(%)/"  # + source; share of the tokens that the language model reads
EPOCHS = "data/epochs/"  # + source; epochs of its samples
MOVED = "data/moved(MiB)"  # between ranks, per step, for streams
IMBALANCE = "balance/imbalance/"  # + module
DRAWN = "balance/imbalance_as_drawn/"  # + module
BLANK = "data/blank_items"  # items read as blank since the start of the job, over all ranks
RESTARTS = "data/worker_restarts"  # data producers lost and replaced since the start of the job, over all ranks


class LogWindow(BaseModel):
    """Sums since the last logged step. They are part of a checkpoint, so that a resumed run logs the same averages.

    computed: module -> tokens that its layers computed (image patches, audio frames, language model tokens). room:
    capacity of the packed rows. sources: source -> its samples and their tokens, if there are several sources. moved:
    bytes that streams sent between ranks. Recorded steps are slower and are left out of throughput.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    loss_sum: float = 0.0
    targets: int = 0
    read_tokens: int = 0
    room: int = 0
    steps: int = 0
    samples: int = 0
    computed: dict[str, int] = {}
    sources: dict[str, list[int]] = {}
    data_seconds: float = 0.0
    seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    moved: int | None = None

    def add(
        self,
        *,
        loss: float,
        targets: int,
        read_tokens: int,
        samples: int,
        computed: Mapping[str, int],
        data: float,
        seconds: float,
        room: int = 0,
        moved: int | None = None,
        timed: bool = True,
        sources: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Adds one step.

        `loss` is the mean over `targets` of `read_tokens` LLM tokens. `data` and `seconds`: time waiting for the batch,
        and time of the whole step. `room`: 0 if rows are not packed. `moved`: None except for streams.
        """
        self.loss_sum += loss * targets
        self.targets += targets
        self.read_tokens += read_tokens
        self.room += room
        for name, (count, tokens) in (sources or {}).items():
            before = self.sources.get(name, [0, 0])
            self.sources = {**self.sources, name: [before[0] + count, before[1] + tokens]}
        if timed:
            self.steps += 1
            if moved is not None:
                self.moved = (self.moved or 0) + moved
            self.samples += samples
            self.computed = {name: self.computed.get(name, 0) + count for name, count in computed.items()}
            self.data_seconds += data
            self.seconds += seconds

    def metrics(self) -> dict[str, float]:
        """Averages of the window under their metric names. No loss if every step was skipped (fp16); no speeds if every
        step was measured."""
        values = {"time_metrics/checkpoint(s)": self.checkpoint_seconds} if self.checkpoint_seconds else {}
        if self.targets:
            values |= {LOSS: self.loss_sum / self.targets, "data/targets(%)": 100.0 * self.targets / self.read_tokens}
        for place, prefix in enumerate((SHARE, TOKEN_SHARE)):
            total = sum(counts[place] for counts in self.sources.values())
            values |= {f"{prefix}{name}": 100.0 * counts[place] / total for name, counts in self.sources.items()}
        if self.room:
            values["data/row_fill(%)"] = 100.0 * self.read_tokens / self.room
        if self.steps:
            seconds = max(self.seconds, 1e-9)
            values["throughput(tps)"] = self.computed.get(LANGUAGE_MODEL, 0) / seconds
            values |= {f"{TOKENS}{name}": count / seconds for name, count in self.computed.items()}
            values["throughput(samples/s)"] = self.samples / seconds
            values["time_metrics/end_to_end(s)"] = seconds / self.steps
            if self.moved is not None:
                values[MOVED] = self.moved / self.steps / 2**20
        return values


def padding(table: StepTable, lengths: Sequence[int]) -> float:
    """Share of padding in the language model's compute, in percent, if it uses one row per sample.

    lengths: of the samples of the step, in tokens; each chunk is padded to its longest sample.
    """
    chunks = [[lengths[i] for i in chunk.samples] for chunk in table.chunks if chunk.module == LANGUAGE_MODEL]
    return 100.0 - 100.0 * sum(map(sum, chunks)) / max(sum(len(chunk) * max(chunk) for chunk in chunks), 1)


def of_ranks(window: LogWindow, everyone: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics from the reports of all ranks (see `of_this_rank`): maximum or sum.

    With several ranks also the rank that waited longest for data, and the rank with the highest memory use.
    """
    waits, used, reserved, blank, decoded, restarts = zip(*everyone, strict=True)
    values: dict[str, float] = {}
    if window.steps:
        values["time_metrics/data_loading(s)"] = max(waits)
        values["time_metrics/data_loading(%)"] = 100.0 * max(waits) / max(window.seconds, 1e-9)
        values["data/decoded(items/s)"] = sum(decoded) / max(window.seconds, 1e-9)
    values |= {"memory/max_active(GiB)": max(used), "memory/all_ranks(GiB)": sum(used)}
    if max(reserved) > 0:
        values["memory/max_reserved(GiB)"] = max(reserved)
    if sum(blank):
        values[BLANK] = sum(blank)
    if sum(restarts):
        values[RESTARTS] = sum(restarts)
    if len(everyone) > 1:
        values["memory/max_active_rank"] = used.index(max(used))
        if window.steps:
            values["time_metrics/data_loading_rank"] = waits.index(max(waits))
    return values


def of_this_rank(window: LogWindow, blank_items: int, decoded: int = 0, restarts: int = 0) -> list[float]:
    """Report of this rank: seconds of waiting for data, peak memory and reserved GPU memory [GiB], unreadable items,
    items decoded for it since the last line, lost producers."""
    return [window.data_seconds, *memory_gib(), float(blank_items), float(decoded), float(restarts)]


def computed_tokens(samples: Sequence[Any], encoders: Mapping[str, Any]) -> dict[str, int]:
    """Module -> tokens that its layers compute for `samples`. The samples need not be decoded."""
    metrics = {
        name: sum(
            encoder.encoder_length(item.shape, item.about) for sample in samples for item in sample.media.get(name, ())
        )
        for name, encoder in encoders.items()
    }
    return metrics | {LANGUAGE_MODEL: sum(map(len, samples))}


def dispatch_metrics(parallel: ParallelModel, table: StepTable, samples: Sequence[Any]) -> dict[str, float]:
    """Load balance over replicas, with and without `train.balance`, and bytes moved.

    For each module with replicas: estimated cost of the costliest replica over the mean. Empty if no module has
    replicas.
    """
    dispatcher = parallel.dispatcher
    if dispatcher is None:
        return {}
    lengths = Lengths.of(samples, list(parallel.layout.modules)[:-1])
    values: dict[str, float] = {}
    for prefix, loads in ((IMBALANCE, dispatcher.computed(table, lengths)), (DRAWN, dispatcher.as_drawn(lengths))):
        values |= {f"{prefix}{name}": float(each.max() / each.mean()) for name, each in loads.items() if each.sum() > 0}
    moved, between = dispatcher.crossing(table)
    values["balance/moved(MB)"] = moved * parallel.feature_bytes / 1e6
    if dispatcher.ranks_per_node is not None:
        values["balance/moved_between_nodes(MB)"] = between * parallel.feature_bytes / 1e6
    return values


class Metrics:
    """Writer of one run's metrics (rank 0): metrics.jsonl and the trackers. Lines after step `start`, left by a killed
    run, are dropped."""

    def __init__(self, folder: Path, *, start: int, trackers: Trackers) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            kept = read_metrics(folder, until=start)
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file: TextIO = self.path.open("a", encoding="utf-8")
        self.trackers = trackers
        trackers.begin(start, lambda: read_metrics(folder, until=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line of JSON and one point per curve."""
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self.trackers.log(step, values)

    def complete(self, line: Mapping[str, float]) -> None:
        """Writes a line that a lost rank 0 may not have written, unless the file has it."""
        step, kept = int(line["step"]), read_metrics(self.path.parent)
        if not kept or kept[-1]["step"] < step:
            self.write(step, {name: value for name, value in line.items() if name != "step"})

    def close(self) -> None:
        """Closes the file. The owner of the trackers closes them."""
        self.file.close()


def memory_gib() -> tuple[float, float]:
    """Peak memory of this process in GiB, and the part that torch has reserved on its GPU. Without a GPU: its resident
    set, and 0."""
    if _device.in_use():
        return torch.accelerator.max_memory_allocated() / 2**30, torch.accelerator.max_memory_reserved() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20), 0.0


def free_memory() -> int | None:
    """Bytes of host memory available to this process (Linux); None if unknown.

    The minimum of the machine's available memory and what is left of the container's limit.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
        groups = Path("/sys/fs/cgroup")
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                free.append(int((groups / limit).read_text()) - int((groups / used).read_text()))
    return min(free, default=None)


def pipeline_metrics(timeline: Timeline) -> dict[str, float]:
    """Busy time per module and bubble of a measured step, in percent of its duration.

    If samples are assigned by estimated work (`train.assign`), also the number of deferred samples and the spread of
    the language model's microbatches: standard deviation of their compute time, in percent of the mean.
    """
    values = {f"{BUSY}{name}": 100.0 * share for name, share in timeline.utilization.items()}
    values["bubble(%)"] = 100.0 * timeline.bubble
    table = timeline.table
    if table is not None and table.work is not None:
        seconds: dict[int, float] = {}
        for record in timeline.records():
            if record.action.op in COMPUTE and record.action.module == LANGUAGE_MODEL:
                chunk = record.action.chunk
                seconds[chunk] = seconds.get(chunk, 0.0) + record.finish - record.start
        spread = statistics.pstdev(seconds.values()) / max(statistics.fmean(seconds.values()), 1e-12)
        values |= {"balance/deferred_samples": len(table.deferred), "balance/microbatch_spread(%)": 100.0 * spread}
    return values


class Clock:
    """Seconds of a block: ``with Clock() as clock: ...``."""

    def __enter__(self) -> Clock:
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self.began


def read_metrics(folder: Path, *, until: int | None = None) -> list[dict[str, float]]:
    """Lines of a run's metrics.jsonl up to the step `until`. A half-written line of a killed run is skipped."""
    lines = json_lines(folder / "metrics.jsonl")
    rows = [line for line in lines if isinstance(line, dict) and type(line.get("step")) is int]
    return [line for line in rows if until is None or line["step"] <= until]
