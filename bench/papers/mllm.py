"""OrchMLLM's models on drawn samples: work of each data-parallel rank in each phase, under several assignments.

Work is counted in FLOPs from the printed shapes (table 1). Ranks hold all modules (FSDP) and run one batch of each
phase per step. Rows of encoders are sent to the rank whose language model reads them, as edges of a StepTable.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.lengths import Lognormal, draw
from interlace import balance
from interlace.schedule import Op, StageGraph, StepTable, check, one_f_one_b
from interlace.schedule.actions import CHUNK, OP, OPS
from interlace.schedule.table import Chunk, Edge
from interlace.simulate import simulate_arrays

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PHASES = ("vision", "audio", "llm")
PEAK = 989e12  # FLOP/s of an H100 in bf16
EFFICIENCY = 0.45  # of the peak while a rank computes; assumed, the same for all phases
NODE = 8
VOCABULARY = 152_064  # Qwen2's


@dataclass(frozen=True)
class Shape:
    """Layers, hidden size, FFN's hidden size as printed; kv: width of keys and values; gated: three matrices."""

    layers: int
    hidden: int
    ffn: int
    kv: int
    gated: bool = False
    vocabulary: int = 0

    @property
    def layer_parameters(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv) + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Number of parameters, without the input embedding, which computes nothing."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def linear(self) -> float:
        """FLOPs of a forward per token."""
        return 2.0 * self.parameters

    def quadratic(self, causal: bool) -> float:
        """FLOPs of attention in a forward per token squared."""
        return (2.0 if causal else 4.0) * self.layers * self.hidden


@dataclass(frozen=True)
class Model:
    """Table 1, the downsampling rates and resolution of section 8, the degrees and batches of 8.1 and 8.3."""

    name: str
    vision: Shape
    audio: Shape
    llm: Shape
    billions: tuple[float, float, float]  # parameters as printed: vision, audio, LLM
    merge: tuple[int, int]  # tokens of an encoder per row that the LLM reads: vision, audio
    resolution: int
    batch: int  # samples of a rank: 2,560 GPUs
    unbalanced_batch: int
    ablation_batch: int  # 128 GPUs
    megatron_stages: int
    megatron_batch: int

    def shape(self, phase: str) -> Shape:
        return {"vision": self.vision, "audio": self.audio, "llm": self.llm}[phase]


def _vit(layers: int, hidden: int) -> Shape:
    return Shape(layers, hidden, 4 * hidden, hidden)


def _qwen(layers: int, hidden: int, ffn: int, kv: int) -> Shape:
    return Shape(layers, hidden, ffn, kv, True, VOCABULARY)


WHISPER = _vit(32, 1280)
MODELS = {
    model.name: model
    for model in (
        Model(
            "MLLM-10B",
            _vit(36, 2048),
            WHISPER,
            _qwen(28, 3584, 18944, 512),
            (2, 0.6, 7),
            (1, 2),
            448,
            80,
            65,
            75,
            2,
            5120,
        ),
        Model(
            "MLLM-18B",
            _vit(40, 2400),
            WHISPER,
            _qwen(48, 5120, 13824, 1024),
            (3, 0.6, 14),
            (4, 2),
            672,
            60,
            40,
            50,
            4,
            5120,
        ),
        Model(
            "MLLM-84B",
            _vit(45, 3200),
            _vit(48, 3072),
            _qwen(80, 8192, 29568, 1024),
            (6, 6, 72),
            (4, 4),
            896,
            30,
            15,
            25,
            10,
            2560,
        ),
    )
}


@dataclass(frozen=True, eq=False)
class Batch:
    """n samples. tokens: of each phase, 0 for a sample without it. home: the rank that drew it."""

    tokens: dict[str, Ints]
    home: Ints

    @property
    def ranks(self) -> int:
        return int(self.home.max()) + 1


@functools.lru_cache(maxsize=8)
def drawn(model: Model, ranks: int, each: int, seed: int) -> Batch:
    """`each` samples of every rank (bench.lengths, "omni"), with pictures up to the model's resolution."""
    mix = draw("omni", ranks * each, seed=seed)
    rng = np.random.default_rng(seed + 1)
    pictured = mix.items["vision"] > 0
    # Pictures of LLaVA-1.5 at their own sizes (mostly COCO's 640 x 480), in patches of 14; larger ones are resized.
    size = Lognormal(640 * 480 / 14**2, 0.5, 64, (model.resolution // 14) ** 2).draw(rng, len(mix))
    vision = np.where(pictured, size, 0)
    audio = mix.items["audio"] * mix.tokens["audio"]
    rows = -(-vision // model.merge[0]) - (-audio // model.merge[1])
    return Batch({"vision": vision, "audio": audio, "llm": mix.text + rows}, np.repeat(np.arange(ranks), each))


# ---------------------------------------------------------------------- assignment of samples

Dealt = dict[str, NDArray[np.int32]]
"""Phase -> the rank of each sample."""

PADDED = {"vision": "packed", "audio": "padded", "llm": "packed"}  # how batches are made (section 8)


def dealt(model: Model, batch: Batch, how: str, *, nodewise: bool = True) -> Dealt:
    """how: "none", "llm" (by the language model alone: pre-balancing), "all", "all rmpad", "all pad" (figure 11)."""
    home = batch.home.astype(np.int32)
    if how == "none":
        return dict.fromkeys(PHASES, home)
    llm = balanced(model, batch, "llm", "packed", nodewise)
    if how == "llm":
        return dict.fromkeys(PHASES, llm)
    made = {"all": PADDED, "all rmpad": dict.fromkeys(PHASES, "packed"), "all pad": dict.fromkeys(PHASES, "padded")}[
        how
    ]
    return {phase: llm if phase == "llm" else balanced(model, batch, phase, made[phase], nodewise) for phase in PHASES}


def balanced(model: Model, batch: Batch, phase: str, batching: str, nodewise: bool) -> NDArray[np.int32]:
    """The rank of each sample in one phase by post-balancing; samples without the modality stay on their rank."""
    tokens = batch.tokens[phase]
    own = np.flatnonzero(tokens)
    shape = model.shape(phase)
    result = batch.home.astype(np.int32)
    new = balance.post_balance(
        tokens[own], batch.ranks, batching=batching, quadratic=shape.quadratic(phase == "llm") / shape.linear()
    )
    if nodewise:
        volume = balance.rearrangement_volume(batch.home[own], new, tokens[own], batch.ranks)
        new = balance.nodewise_placement(volume, NODE)[new]
    result[own] = new
    return result


def flops(model: Model, batch: Batch, phase: str, rank_of: NDArray[np.int32]) -> tuple[Floats, float]:
    """(FLOPs of a forward of each rank with its batching, FLOPs of all without padding)."""
    shape, tokens = model.shape(phase), batch.tokens[phase].astype(np.float64)
    causal = phase == "llm"
    each = shape.linear() * tokens + shape.quadratic(causal) * tokens**2
    if PADDED[phase] == "packed":
        return np.bincount(rank_of, each, batch.ranks).astype(np.float64), float(each.sum())
    longest, count = np.zeros(batch.ranks), np.bincount(rank_of[tokens > 0], minlength=batch.ranks)
    np.maximum.at(longest, rank_of, tokens)
    return count * (shape.linear() * longest + shape.quadratic(causal) * longest**2), float(each.sum())


@dataclass(frozen=True)
class Step:
    """seconds: if every phase waits for the slowest rank. loose: simulated, ranks wait for rows alone. useful: FLOPs
    without padding. tokens: of the language model. fullest: per phase, tokens of the fullest rank over the mean."""

    seconds: float
    loose: float
    useful: float
    tokens: int
    fullest: dict[str, float]
    ranks: int

    @property
    def mfu(self) -> float:
        return self.useful / (self.seconds * self.ranks * PEAK)

    @property
    def throughput(self) -> float:
        """Tokens of the language model per second and GPU."""
        return self.tokens / self.seconds / self.ranks


def step(model: Model, batch: Batch, ranks_of: Dealt, simulated: bool = True) -> Step:
    """One step: a backward takes twice its forward, and every phase is trained."""
    result = {phase: flops(model, batch, phase, ranks_of[phase]) for phase in PHASES}
    forward = {phase: own / (PEAK * EFFICIENCY) for phase, (own, _) in result.items()}
    seconds = 3 * sum(float(own.max()) for own in forward.values())
    loads = {phase: np.bincount(ranks_of[phase], batch.tokens[phase], batch.ranks) for phase in PHASES}
    return Step(
        seconds,
        makespan(batch, ranks_of, forward) if simulated else float("nan"),
        3 * sum(useful for _, useful in result.values()),
        int(batch.tokens["llm"].sum()),
        {phase: float(load.max() / load.mean()) for phase, load in loads.items()},
        batch.ranks,
    )


def makespan(batch: Batch, ranks_of: Dealt, forward: dict[str, Floats]) -> float:
    """Seconds of the step by the event simulator: ranks wait for the rows that they read, transfers are free."""
    ranks = batch.ranks
    links = [(phase, "llm") for phase in PHASES[:-1]]
    graph = StageGraph.build({phase: [0] for phase in PHASES}, links, replicas=ranks)
    chunks: list[Chunk] = []
    place = {}
    for phase in PHASES:
        order = np.argsort(ranks_of[phase], kind="stable")
        order = order[batch.tokens[phase][order] > 0]
        parts = np.split(order, np.searchsorted(ranks_of[phase][order], np.arange(1, ranks)))
        place[phase] = np.full(ranks, -1)
        for rank, own in enumerate(parts):
            if len(own):
                place[phase][rank] = len(chunks)
                chunks.append(Chunk(phase, rank, 0, own.astype(np.int32)))
    edges = []
    for phase in PHASES[:-1]:
        own = np.flatnonzero(batch.tokens[phase])
        pairs = np.stack([place[phase][ranks_of[phase][own]], place["llm"][ranks_of["llm"][own]]], axis=1)
        pairs = np.unique(pairs, axis=0)
        zero, one = np.zeros(len(pairs), int), np.ones(len(pairs), int)
        pieces = np.stack([pairs[:, 0], zero, pairs[:, 1], zero, one], axis=1).astype(np.int32)
        edges.append(Edge(phase, "llm", "embeds", pieces))
    schedule = one_f_one_b(graph, StepTable(tuple(chunks), tuple(edges)), reduce_grad=False)
    check(schedule)
    of_chunk = np.array([forward[chunk.module][chunk.replica] for chunk in chunks])
    times = np.array([{Op.FORWARD: 1.0, Op.BACKWARD: 2.0}.get(op, 0.0) for op in OPS])
    rows = schedule.rows
    return simulate_arrays(schedule, times[rows[:, OP]] * of_chunk[rows[:, CHUNK]]).makespan
