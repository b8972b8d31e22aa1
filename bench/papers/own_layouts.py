"""Separate layouts for encoder and language model, on shared ranks and on separate ranks, against one layout for both.

The newest peer (NVIDIA, arXiv 2605.27678, behind Megatron MIMO) prints two figures: up to +49.3 % TFLOP/s per GPU on
shared ranks, up to +13.0 % tokens/s on separate ones. Its models and data are not available, so only the direction is
compared. Steps of drawn lengths are simulated, with tables from `step_table` and layouts from `Layout.from_specs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lengths import Drawn, draw
from bench.papers.cornstarch_shapes import LLAMA, QWEN2_VISION
from bench.papers.frame import Claim, Row, Rows, Table
from bench.papers.pipeline import LANGUAGE_MODEL, Modules
from bench.papers.shapes import H100, Transformer, costs_of
from interlace.layout import Layout, ParallelSpec
from interlace.plan import LinkModel, ModuleCosts
from interlace.run.tables.table import step_table
from interlace.schedule import Action, Op, StageGraph, one_f_one_b
from interlace.simulate import simulate

GPUS, SAMPLES_PER_GPU, MICROBATCHES = 64, 64, 64
SMALL_GPUS, SMALL_SAMPLES, SMALL_MICROBATCHES = 32, 4, 4
ENCODER_CHUNKS = (8, 16, 32)  # per replica of an encoder on separate ranks
NETWORK = LinkModel(10e-6, 1 / 50e9)  # of one GPU: 400 Gbit/s
ENCODERS = {"0.6B": QWEN2_VISION["S"], "3.9B": QWEN2_VISION["M"]}
MODELS = {"8B": (LLAMA["M"], 4, 2), "32B": (LLAMA["L"], 8, 2)}  # with the language model's tp and pp
DATA = {"pictures": "llava", "videos": "clips"}
CASES = tuple(f"{vision} + {llm}, {data}" for llm in MODELS for vision in ENCODERS for data in DATA)


class Work(NamedTuple):
    """Per sample: FLOPs of the forward of a layer, of the part after the last layer, and tokens, float64 [n] each."""

    layer: NDArray[np.float64]
    head: NDArray[np.float64]
    tokens: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Case:
    shapes: dict[str, Transformer]
    work: dict[str, Work]
    drawn: Drawn
    tp: int
    pp: int
    gpus: int
    microbatches: int

    @classmethod
    def of(cls, name: str, small: bool) -> Case:
        models, data = name.split(", ")
        vision, language = models.split(" + ")
        llm, tp, pp = MODELS[language]
        gpus, each, microbatches = (
            (SMALL_GPUS, SMALL_SAMPLES, SMALL_MICROBATCHES) if small else (GPUS, SAMPLES_PER_GPU, MICROBATCHES)
        )
        drawn = draw(DATA[data], each * gpus, seed=0)
        items, tokens = drawn.items["vision"].astype(float), drawn.tokens["vision"].astype(float)
        total = drawn.total.astype(float)
        encoder = ENCODERS[vision]
        zero = np.zeros(len(drawn))
        layer = items * (2 * encoder.layer_parameters * tokens + 4 * encoder.hidden * tokens**2)
        pairs = total * (total + 1) / 2
        return cls(
            {"vision": encoder, LANGUAGE_MODEL: llm},
            {
                "vision": Work(layer, zero, items * tokens),
                LANGUAGE_MODEL: Work(
                    2 * llm.layer_parameters * total + 4 * llm.hidden * pairs,
                    2.0 * llm.vocabulary * llm.hidden * total, total,
                ),
            },
            drawn, tp, pp, gpus, microbatches,
        )  # fmt: skip

    def forward(self, module: str, samples: NDArray[np.int32], layers: range, tp: int) -> tuple[float, float]:
        """(seconds of computing, seconds of tensor parallelism's sums) of some layers for a chunk."""
        shape, work = self.shapes[module], self.work[module]
        flops = len(layers) * work.layer[samples].sum()
        if shape.layers - 1 in layers:
            flops += work.head[samples].sum()
        size = 2.0 * work.tokens[samples].sum() * shape.hidden
        sums = 2 * len(layers) * H100.link.all_reduce(size, tp) if tp > 1 else 0.0
        return H100.seconds(float(flops)) / tp, sums

    def costs(self, tp: int) -> dict[str, ModuleCosts]:
        """Mean seconds of each layer with its sums, as weights for cuts."""
        result = {}
        for module, shape in self.shapes.items():
            everyone = np.arange(len(self.drawn), dtype=np.int32)
            seconds = [sum(self.forward(module, everyone, range(i, i + 1), tp)) for i in range(shape.layers)]
            result[module] = costs_of(np.array(seconds), np.arange(shape.layers), np.ones(shape.layers, bool))
        return result

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of all samples."""
        return 3 * sum(float(self.shapes[m].layers * w.layer.sum() + w.head.sum()) for m, w in self.work.items())

    def step(self, layout: Layout, tp: dict[str, int], *, chunks: int | None = None) -> float:
        """Seconds of a step of all samples.

        tp: GPUs of a lane of each module. chunks: of each replica of the encoder.
        """
        table = step_table(
            layout,
            self.drawn.lengths(),
            microbatches=self.microbatches,
            chunks=None if chunks is None else {"vision": chunks},
        )
        trainable = {name: (True,) * shape.layers for name, shape in self.shapes.items()}
        graph = StageGraph(layout, (("vision", LANGUAGE_MODEL),), trainable)

        def duration(op: Op, module: str, stage: int, chunk: int) -> float:
            result = layout.pipelines(module)[0].stages[stage]
            samples = table.chunks[chunk].samples
            computing, sums = self.forward(module, samples, range(result.start, result.stop), tp[module])
            return computing + sums if op is Op.FORWARD else 2 * computing + sums

        def reduce_grad(action: Action) -> float:
            reduction = graph.reductions[action.other]
            layers = (reduction.stop - reduction.start) * self.shapes[action.module].layer_parameters
            return NETWORK.all_reduce(2.0 * layers / tp[action.module], len(reduction.ranks))

        schedule = one_f_one_b(graph, table, durations=duration)
        return simulate(schedule, duration, reduce_grad=reduce_grad).makespan

    # ------------------------------------------------------------------ the three arms

    def one_layout(self) -> float:
        """One tp, pp and dp for both: a chain of all layers, cut where its stages are most even."""
        costs = self.costs(self.tp)
        layout = Layout.balanced(Modules(costs), self.pp, costs=costs, dp=self.gpus // (self.tp * self.pp))
        return self.step(layout, {"vision": self.tp, LANGUAGE_MODEL: self.tp})

    def shared(self) -> float:
        """The whole encoder on every GPU, for all samples first; then the language model on the same GPUs. If that is
        faster, the encoder's backwards come last, where 1F1B leaves them, as in Megatron's three phases (its pull
        request 4784)."""
        specs = {
            "vision": ParallelSpec(dp=self.gpus),
            LANGUAGE_MODEL: ParallelSpec(tp=self.tp, pp=self.pp, dp=self.gpus // (self.tp * self.pp)),
        }
        costs = self.costs(1)
        layout = Layout.from_specs(Modules(costs), specs, placement="shared", costs=costs)
        return self.step(layout, {"vision": 1, LANGUAGE_MODEL: self.tp})

    def separate(self) -> tuple[float, int, int]:
        """The encoder on separate GPUs: (seconds, number of GPUs, chunks of each), the best of all."""
        lane = self.tp * self.pp
        chunks = [count for count in ENCODER_CHUNKS if count <= self.microbatches] or [self.microbatches]
        return min((self._separate(n, count), n, count) for n in range(lane, self.gpus, lane) for count in chunks)

    def _separate(self, encoding: int, chunks: int) -> float:
        dp = (self.gpus - encoding) // (self.tp * self.pp)
        costs = self.costs(1)
        specs = {"vision": ParallelSpec(dp=encoding), LANGUAGE_MODEL: ParallelSpec(tp=self.tp, pp=self.pp, dp=dp)}
        layout = Layout.from_specs(Modules(costs), specs, placement="parallel", costs=costs)
        return self.step(layout, {"vision": 1, LANGUAGE_MODEL: self.tp}, chunks=chunks)


def layouts(name: str, small: bool) -> list[Row]:
    case = Case.of(name, small)
    one, shared = case.one_layout(), case.shared()
    separate, encoding, chunks = case.separate()
    rows = [
        Row(name, f"{arm}: TFLOP/s per GPU", None, case.flops / seconds / case.gpus / 1e12)
        for arm, seconds in (("one layout", one), ("shared ranks", shared), ("separate ranks", separate))
    ]
    encoder, llm = (float(case.shapes[m].layers * w.layer.sum() + w.head.sum()) for m, w in case.work.items())
    return [
        *rows,
        Row(name, "FLOPs of the encoder", None, encoder / (encoder + llm)),
        Row(name, "separate ranks: GPUs of the encoder", None, encoding),
        Row(name, "separate ranks: chunks of each of them", None, chunks),
        Row(name, "shared ranks / one layout", None, one / shared),
        Row(name, "separate ranks / one layout", None, one / separate),
    ]


def own_is_better(rows: Rows) -> list[Claim]:
    shared = {row.case: row.ours for row in rows if row.what == "shared ranks / one layout"}
    separate = {row.case: row.ours for row in rows if row.what == "separate ranks / one layout"}
    best = max(shared, key=shared.__getitem__)
    return [
        Claim("own layouts on shared ranks gain", "up to +49.3 % TFLOP/s per GPU",
              f"{min(shared.values()) - 1:+.1%} to {shared[best] - 1:+.1%} ({best})", shared[best] > 1,
              "models and data are ours, so only the sign compares; and our one layout is cut anywhere, also inside "
              "the encoder"),
        Claim("own layouts on separate ranks gain", "up to +13.0 % tokens/s",
              f"{min(separate.values()) - 1:+.1%} to {max(separate.values()) - 1:+.1%}", max(separate.values()) > 1),
        Claim("shared ranks gain more than separate ones", "49.3 % against 13.0 %",
              f"{shared[best] - 1:+.1%} against {max(separate.values()) - 1:+.1%} at most",
              shared[best] > max(separate.values())),
    ]  # fmt: skip


TABLES = (
    Table("nvidia-2605.27678", "NVIDIA, arXiv 2605.27678 (abstract)",
          "One layout for encoder and language model, own ones on shared ranks, own ones on separate ranks.", CASES,
          layouts, own_is_better,
          assumed=(f"{GPUS} GPUs, {SAMPLES_PER_GPU} samples each, {MICROBATCHES} microbatches per replica; seconds "
                   f"from FLOPs at {H100}; nothing frozen, nothing recomputed",
                   "lengths of bench/lengths.py: llava (pictures) and clips (videos); samples dealt by the step table",
                   "one layout is a chain of all layers cut evenly anywhere, with the language model's tp and dp; own "
                   "layouts have an encoder that is whole on each of its GPUs; on shared ranks in three phases where "
                   "that is faster, on separate ones with the best number of GPUs and of chunks",
                   "sums of tensor parallelism at 450 GB/s and of gradients at 50 GB/s per GPU; rows between modules "
                   "travel free; memory is not counted, though shared ranks keep the encoder's activations of all "
                   "samples"),
          missing=("its models, data and GPUs: the paper's text is not at hand, its two figures are of the abstract",)),
)  # fmt: skip
