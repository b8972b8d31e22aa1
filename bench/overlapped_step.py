"""Communication overlap of tensor and context parallelism in a whole step.

    python -m bench.overlapped_step [--ratio 0.7] [--rounds 4] [--out bench/results/overlapped_step.json]

Two processes of one thread each train a Qwen3 by `parallelize`: forward and backward of one chunk of packed documents,
in a lane of tp = 2 with and without sequence parallelism, and of cp = 2. The lane communicates over an emulated link,
as in `bench.overlap`. Communication between lanes or replicas (sums of gradients, the loss of the step) does not use
this link. In turns:

    serial       every transfer is waited for where it is issued
    overlapped   as users get it

Time is that of the computing thread (`bench.clocked_link`), so other programs on the machine do not count. The core
time of the emulated link's copies is left out. It is included in `bench.overlap`, where two more threads share the
cores.

    hidden = (waited serial - waited overlapped) / communication, communication = time that the link was busy

"waited" covers the link alone: ranks wait for each other only because other programs disturb one of them. The bytes of
a step are counted in a step without transfers.

For comparison, each operation of a layer also runs alone, at the same shapes and number of chunks, over the same link.
Their hidden parts are weighted by their time on the link. The bandwidth is set for the operation with the most
communication relative to its computation: its ratio is `ratio`, so each operation could hide all of its own.
Other communication of a step (sums of embeddings, of the loss and where rows are cut and joined) is only in the step's
fraction. `operations` lists for each the busy time of the link, and the waiting time of the program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.clocked_link import Clocked, Counted, Link
from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.overlap import LATENCY, WORLD, Case, Serial, backward, forward
from bench.simulated_step import Others
from interlace import comm
from interlace.comm.overlap import context_parallel
from interlace.comm.overlap.context_parallel import ContextParallelPlan
from interlace.comm.overlap.matmul import chunks_for
from interlace.comm.transports import Transport
from interlace.layout import Layout, ParallelSpec
from interlace.masks import BitfieldMask
from interlace.model import MultimodalModel, Sample
from interlace.parallel import Ranks
from interlace.parallel.context import assign_tokens
from interlace.parallel.products import copied_products, sum_of_products
from interlace.run import ParallelModel, parallelize


class Sizes(NamedTuple):
    """Sizes of the model, and of its chunk: `documents` of `length` tokens each. heads of `width` features."""

    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    width: int = 128
    layers: int = 8
    vocabulary: int = 4096
    documents: int = 4
    length: int = 1024

    @property
    def tokens(self) -> int:
        return self.documents * self.length


QUICK = Sizes(32, 48, 4, 2, 8, 2, 64, 2, 40)
LAYOUTS = {
    "tp = 2, sequence parallel": (ParallelSpec(tp=2), True),
    "tp = 2, whole rows": (ParallelSpec(tp=2), False),
    "cp = 2": (ParallelSpec(cp=2), True),
}


def build_model(sizes: Sizes) -> MultimodalModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width, max_position_embeddings=sizes.length, attn_implementation="interlace",
    )  # fmt: skip
    return MultimodalModel(language_model=Qwen3ForCausalLM(config)).train()


def build_samples(sizes: Sizes) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(sizes.documents):
        ids = torch.randint(0, sizes.vocabulary, (sizes.length + 1,), generator=generator)
        samples.append(Sample(input_ids=ids[:-1], labels=ids[1:], media={}, name="bench"))
    return samples


# ---------------------------------------------------------------------- the operations of a layer


def operations(sizes: Sizes, spec: ParallelSpec, rows_cut: bool, rank: int) -> list[tuple[Case, int]]:
    """The communicating operations in a layer of this layout, each alone, and their numbers of chunks."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if spec.cp > 1:
        mask = BitfieldMask.pack([BitfieldMask.causal(1, sizes.length)] * sizes.documents)
        shards = assign_tokens(mask, WORLD, "lpt")
        built = ContextParallelPlan.build(mask, shards, rank)
        q, k, v = (
            draw(1, heads, shards.tokens_per_rank, sizes.width)
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )

        def attend(group: Transport, chunks: int) -> Tensor:
            each = -(-sizes.kv_heads // chunks)
            out = comm.context_parallel_attention(q, k, v, built, shards, group=group, heads_per_chunk=each)
            assert isinstance(out, Tensor)
            return out

        bytes_of_head = shards.tokens_per_rank * 2 * sizes.width * q.element_size()
        chunks = -(-sizes.kv_heads // min(-(-context_parallel.LEAST_BYTES // bytes_of_head), sizes.kv_heads))
        name = "context_parallel_attention"
        return [
            (Case(f"{name} forward", forward(attend)), chunks),
            (Case(f"{name} backward", backward(attend, [q, k, v])), chunks),
        ]
    rows, hidden = sizes.tokens, sizes.hidden
    chunks = chunks_for(rows // WORLD, hidden * 4, 1, WORLD)
    queries, keys = sizes.heads * sizes.width // WORLD, sizes.kv_heads * sizes.width // WORLD
    inner = sizes.intermediate // WORLD
    result = []
    for name, outs in (("queries, keys and values", (queries, keys, keys)), ("gate and up", (inner, inner))):
        result += [(case, chunks) for case in _into(name, draw, [draw(n, hidden) for n in outs], sizes, rows_cut)]
    for name, width in (("out of attention", queries), ("down", inner)):
        result += [(case, chunks) for case in _back(name, draw(rows, width), draw(hidden, width), rows_cut)]
    return result


def _into(name: str, draw: Callable[..., Tensor], weights: list[Tensor], sizes: Sizes, rows_cut: bool) -> list[Case]:
    """The products of layers that are cut by their outputs."""
    x = draw(sizes.tokens // WORLD if rows_cut else sizes.tokens, sizes.hidden)
    if not rows_cut:

        def copied(group: Transport, chunks: int) -> list[Tensor]:
            return copied_products(x, weights, Ranks(group), chunks)[1]

        return [Case(f"copied_products backward, {name}", backward(copied, [x, *weights]))]  # nothing travels forward

    def gathered(group: Transport, chunks: int) -> list[Tensor]:
        return comm.all_gather_matmul(x, weights, group=group, num_chunks=chunks)[1]

    return [
        Case(f"all_gather_matmul forward, {name}", forward(gathered)),
        Case(f"all_gather_matmul backward, {name}", backward(gathered, [x, *weights])),
    ]


def _back(name: str, x: Tensor, weight: Tensor, rows_cut: bool) -> list[Case]:
    """The product of a layer that is cut by its inputs."""
    if not rows_cut:

        def summed(group: Transport, chunks: int) -> Tensor:
            return sum_of_products(x, weight, Ranks(group), chunks)

        return [Case(f"sum_of_products forward, {name}", forward(summed))]  # nothing travels backward

    def scattered(group: Transport, chunks: int) -> Tensor:
        return comm.matmul_reduce_scatter(x, weight, group=group, num_chunks=chunks)

    return [
        Case(f"matmul_reduce_scatter forward, {name}", forward(scattered)),
        Case(f"matmul_reduce_scatter backward, {name}", backward(scattered, [x, weight])),
    ]


def hidden_part(serial: Clocked, overlapped: Clocked, communication: float) -> float:
    return (sum(serial.waited.values()) - sum(overlapped.waited.values())) / communication


class Alone(NamedTuple):
    """Computation without a link, in seconds, and the traffic to a rank."""

    computation: float
    batches: int
    bytes: int

    def communication(self, bandwidth: float) -> float:
        """Seconds that a link of this bandwidth is busy."""
        return self.bytes / bandwidth + self.batches * LATENCY

    def bandwidth(self, ratio: float) -> float:
        """Bandwidth of a link that is busy for `ratio` of the computation."""
        return self.bytes / max(ratio * self.computation - self.batches * LATENCY, 1e-4)


def alone(case: Case, chunks: int, inner: Transport, repeats: int) -> Alone:
    """One operation without its transfers."""
    seconds, counted = [], Counted(inner)
    for _ in range(repeats):
        call = case.prepare(counted, chunks)
        counted.batches = counted.bytes = 0  # bytes of the forward that the backward needs
        seconds.append(Clocked.of(Link(inner, 1.0), call).seconds)
    return Alone(statistics.median(seconds), counted.batches, counted.bytes)


def over_link(
    case: Case, chunks: int, inner: Transport, found: Alone, bandwidth: float, repeats: int
) -> dict[str, Any]:
    """One operation over the link; found: its figures without a link."""
    link, communication = Link(inner, bandwidth), found.communication(bandwidth)
    pairs = []
    for _ in range(repeats):
        serial = Clocked.of(link, case.prepare(Serial(link), chunks))
        pairs.append((serial, Clocked.of(link, case.prepare(link, chunks))))
    return {
        "operation": case.name,
        "chunks": chunks,
        "bytes": found.bytes,
        "communication_ms": communication * 1e3,
        "computation_ms": found.computation * 1e3,
        "serial_ms": statistics.median(serial.seconds for serial, _ in pairs) * 1e3,
        "overlapped_ms": statistics.median(overlapped.seconds for _, overlapped in pairs) * 1e3,
        "hidden": statistics.median(hidden_part(*pair, communication) for pair in pairs),
    }


# ---------------------------------------------------------------------- steps


class Steps:
    """Steps of a layout, over different transports."""

    def __init__(self, parallel: ParallelModel, samples: list[Sample]) -> None:
        self.parallel, self.samples = parallel, samples
        self.inner = self._transport()
        self.losses: list[float] = []
        parallel.evaluate([samples])  # one-time comparisons between ranks are not counted

    def _transport(self) -> Transport:
        """Transport of this rank's lane, which has one group."""
        result: list[Transport] = []

        def note(transport: Transport) -> Transport:
            result.append(transport)
            return transport

        self.parallel.connect_lanes(note)
        [only] = result
        return only

    def __call__(self, link: Link, transport: Transport) -> Clocked:
        """A step that communicates over `transport`, which is made of `link`."""
        self.parallel.connect_lanes(lambda _: transport)
        self.parallel.zero_grad()
        return Clocked.of(link, lambda: self.losses.append(self.parallel.step([self.samples]).loss))


def run_layout(name: str, sizes: Sizes, settings: dict[str, Any], rank: int) -> dict[str, Any]:
    spec, rows_cut = LAYOUTS[name]
    mllm = build_model(sizes)
    layout = Layout.from_specs(mllm, {"language_model": spec})
    parallel = parallelize(mllm, layout, transport="distributed", sequence_parallel=rows_cut, timeout=120)
    steps = Steps(parallel, build_samples(sizes))
    inner, rounds, repeats = steps.inner, settings["rounds"], settings["repeats"]

    cases = operations(sizes, spec, rows_cut, rank)
    by_itself = [alone(case, chunks, inner, repeats) for case, chunks in cases]
    bandwidth = max(result.bandwidth(settings["ratio"]) for result in by_itself)
    single = [
        over_link(case, chunks, inner, result, bandwidth, repeats)
        for (case, chunks), result in zip(cases, by_itself, strict=True)
    ]
    busy = sum(row["communication_ms"] for row in single)
    single_hidden = sum(row["hidden"] * row["communication_ms"] for row in single) / busy

    link = Link(inner, bandwidth)
    counted = Counted(link)
    steps(link, counted)
    others = Others()
    turns = [(steps(link, Serial(link)), steps(link, link)) for _ in range(rounds)]
    true = steps.losses[1:]  # without those of steps on zeros
    assert max(true) == min(true), f"one loss of all steps, {true}"
    whole = Alone(0.0, counted.batches, counted.bytes).communication(bandwidth)
    hidden = [hidden_part(serial, overlapped, whole) for serial, overlapped in turns]

    def middle(numbers: Iterable[float]) -> float:
        return statistics.median(numbers)

    return {
        "layout": name,
        "chunks": sorted({chunks for _, chunks in cases}),
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "communication_ms": whole * 1e3,
        "computation_ms": middle(serial.seconds - sum(serial.waited.values()) for serial, _ in turns) * 1e3,
        "serial_ms": middle(serial.seconds for serial, _ in turns) * 1e3,
        "overlapped_ms": middle(overlapped.seconds for _, overlapped in turns) * 1e3,
        "hidden": middle(hidden),
        "hidden_of_rounds": sorted(hidden),
        "single_hidden": single_hidden,
        "gap_points": 100 * (single_hidden - middle(hidden)),
        "in_layers": busy * sizes.layers / (whole * 1e3),
        "other_cores": others.cores(),
        "operations": [
            {
                "operation": operation,
                "batches": batches,
                "bytes": size,
                "link_ms": Alone(0.0, batches, size).communication(bandwidth) * 1e3,
                "serial_waited_ms": middle(serial.waited[operation] for serial, _ in turns) * 1e3,
                "overlapped_waited_ms": middle(overlapped.waited[operation] for _, overlapped in turns) * 1e3,
            }
            for operation, (batches, size) in counted.found.items()
        ],
        "single": single,
    }


def run_rank(rank: int, port: int, sizes: Sizes, settings: dict[str, Any], result: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, WORLD, port, 300)
    found = []
    for name in settings["layouts"]:
        found.append(run_layout(name, sizes, settings, rank))
        if rank == 0:
            print(line(found[-1]), flush=True)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    first, *_, last = row["hidden_of_rounds"] * 2
    return (
        f"{row['layout']:26} computation {row['computation_ms']:7.1f} ms, communication {row['communication_ms']:6.1f} "
        f"({row['in_layers']:.0%} in layers), serial {row['serial_ms']:7.1f}, overlapped {row['overlapped_ms']:7.1f}: "
        f"hidden {row['hidden']:4.0%} ({first:.0%} to {last:.0%}), operations alone {row['single_hidden']:4.0%}, gap "
        f"{row['gap_points']:+.0f} points; others kept {row['other_cores']:.2f} cores busy"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print a line per layout, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.7, help="communication over computation, at most")
    parser.add_argument("--rounds", type=int, default=4, help="of every layout")
    parser.add_argument("--repeats", type=int, default=5, help="of every single operation")
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--quick", action="store_true", help="toy sizes, whose figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overlapped_step.json"))
    options = parser.parse_args(argv)
    sizes = QUICK if options.quick else Sizes(layers=options.layers)
    settings = {name: getattr(options, name) for name in ("ratio", "rounds", "repeats", "layouts")}
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), sizes, settings, result), nprocs=WORLD)
        rows = json.loads(Path(result).read_text())
    report = {
        "benchmark": "overlapped_step",
        "command": command("overlapped_step", argv),
        "machine": {**machine(), "ranks": WORLD, "threads_per_rank": 1},
        "versions": versions("torch", "transformers"),
        "settings": settings | {"quick": options.quick, "latency_ms": LATENCY * 1e3},
        "model": sizes._asdict(),
        "rows": rows,
    }
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
