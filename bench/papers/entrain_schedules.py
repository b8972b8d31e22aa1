"""Entrain's schedules: iteration time and memory of DistTrain, DIP and Entrain (figures 4.12 to 4.14), cuts (4.15)."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from bench.papers import vlm
from bench.papers.entrain_ratios import DIP, GPUS, LENGTHS, PAIRS, RATES, SEEDS, SETTING, sizes_of
from bench.papers.frame import Claim, Row, Rows, Table, ahead
from interlace import plan

LANES = GPUS // vlm.TP
CUTS = {  # tables 4.1 and C.1: stages of encoder and language model of DistTrain and Entrain; DIP has 8 of both
    "SynthChartNet 1b": ((4, 4), (5, 3)),
    "LLaVA-150k 1b": ((5, 3), (4, 4)),
    "ChartQA 1b": ((5, 3), (5, 3)),
    "CocoQA 1b": ((4, 4), (5, 3)),
    "SynthChartNet 3b": ((5, 3), (4, 4)),
    "LLaVA-150k 3b": ((4, 4), (3, 5)),
    "ChartQA 3b": ((4, 4), (4, 4)),
    "CocoQA 3b": ((4, 4), (3, 5)),
}
MAIN = "SynthChartNet 3b"
STATE_BYTES = 16  # per parameter: weight and gradient in bf16, Adam's moments and master weight in fp32
GPU_BYTES = 48e9  # of an A40
NAMED = {"profiling": "profiling (algorithm 2)", "search": "the search of all cuts (algorithm 3)"}
LAYER_BYTES = 34  # per token and unit of width that a layer keeps for its backward, attention by blocks (bf16)
PLAY = (
    "a backward takes twice its forward and all parts are trained; transfers and gradient sums are free; schedules are "
    "1F1B with warm-up forwards as early as their costs allow, for DIP the encoder's forwards, the language model, the "
    "encoder's backwards (figure 4.2c); all are proved by the checker"
)


def systems(case: str, small: bool, profiled: bool = False) -> dict[str, tuple[vlm.Stages, list[vlm.Replica]]]:
    """Each system's cuts of the model and assignment of samples; profiled: cuts by our lengths, not as printed."""
    _, model = PAIRS[case]
    samples, replicas = sizes_of(small)
    vision, llm = costs(case, small)
    theirs, entrain = profiled_cuts(case) if profiled else CUTS[case]
    microbatches = samples // replicas // 4
    dealt = vlm.entrain(vision, llm, replicas, microbatches)
    return {
        "DistTrain": (vlm.Stages.cut(model, *theirs), vlm.disttrain(vision, llm, replicas, 4, theirs)),
        "DIP": (vlm.Stages.cut(model, LANES, LANES, colocated=True), vlm.dip(vision, samples, replicas, 4)),
        "Entrain": (vlm.Stages.cut(model, *entrain), dealt),
        "static 1F1B": (vlm.Stages.cut(model, *entrain), vlm.static(samples, replicas, 4)),
    }


@functools.cache
def profiled_cuts(case: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Stages that DistTrain finds from one sample and Entrain from a stable batch (4.7.1), with our samples."""
    each = np.stack(vlm.seconds(vlm.work(*PAIRS[case], vlm.SAMPLES, SEEDS["trials"]), PAIRS[case][1]), axis=1)
    one = plan.proportional_allocation(LANES, each[0]).tolist()
    many = plan.stable_batch_size(each, LANES).allocation.tolist()
    return (one[0], one[1]), (many[0], many[1])


def costs(case: str, small: bool) -> tuple[vlm.Floats, vlm.Floats]:
    """Forward seconds of each sample of the step in encoder and language model."""
    dataset, model = PAIRS[case]
    return vlm.seconds(vlm.work(dataset, model, sizes_of(small)[0], SEEDS["step"]), model)


# ---------------------------------------------------------------------- figures 4.12 and 4.13


def speeds(case: str, small: bool) -> list[Row]:
    """Seconds of an iteration of each system, with cuts from our profiling, and with printed cuts."""
    rows = []
    for profiled in (True, False):
        for system, (stages, replicas) in systems(case, small, profiled).items():
            if not profiled and system in ("DIP", "static 1F1B"):
                continue
            seconds, _ = vlm.iteration(stages, replicas, *costs(case, small))
            cut = f"{len(stages.encoder)}/{len(stages.llm)}"
            rows.append(Row(case, system if profiled else f"{system}, printed cut", None, float(seconds), "s"))
            if system in ("DistTrain", "Entrain"):
                printed = "/".join(map(str, CUTS[case][system == "Entrain"]))
                if profiled:
                    rows.append(Row(case, f"{system}: stages of encoder and LLM", printed, cut))
    return rows


def speed_claims(rows: Rows) -> list[Claim]:
    claims = []
    for system in ("DistTrain", "DIP", "static 1F1B"):
        claims += _faster(rows, system, "Entrain", f"Entrain's iteration is shorter than that of {system}")
    printed = "with the printed cuts, which were made for other lengths: Entrain's is shorter than that of DistTrain"
    return claims + _faster(rows, "DistTrain, printed cut", "Entrain, printed cut", printed)


def _faster(rows: Rows, system: str, entrain: str, says: str) -> list[Claim]:
    """Claims for the data whose lengths vary most, then for all data."""
    ratio = {case: rows.ours(case, system) / rows.ours(case, entrain) for case in rows.cases()}
    most = [ratio[case] for case in ratio if case.startswith("SynthChartNet")]
    behind = [f"{case} {each:.2f} x" for case, each in ratio.items() if not ahead(each)]
    ours = f"{min(ratio.values()):.2f} to {max(ratio.values()):.2f} x, {len(ratio) - len(behind)} of {len(ratio)} ahead"
    said = "up to 1.40 x" if system != "static 1F1B" else "-"
    why = f"not ahead by 2 % on {', '.join(behind)}: {BEHIND[system]}" if behind else ""
    return [
        Claim(f"{says} (SynthChartNet)", said, ", ".join(f"{each:.2f} x" for each in most), ahead(min(most))),
        Claim(f"{says} (all data)", "(figure)", ours, not behind, why),
    ]


BEHIND = {
    "DistTrain": "pictures of these data have nearly one size, so that there is little to balance",
    "DistTrain, printed cut": "by our lengths these cuts of Entrain are not the best ones (see entrain-4.15)",
    "DIP": "colocated stages are balanced whatever the ratio, and neither the memory that it takes (figure 4.14) nor "
    "smaller kernels and twice as many transfers cost anything in this simulation",
    "static 1F1B": "there is little to balance",
}


def pictures(case: str, small: bool) -> list[Row]:
    """Length and bubble of the step of figure 4.13, for the slowest replica."""
    rows = []
    for system, (stages, replicas) in systems(MAIN, small).items():
        if system != case:
            continue
        seconds, timelines = vlm.iteration(stages, replicas, *costs(MAIN, small))
        rows += [
            Row(case, "iteration", None, float(seconds), "s"),
            Row(case, "bubble of all ranks", None, float(np.mean([timeline.bubble for timeline in timelines]))),
            Row(case, "microbatches", None, int(replicas[0].slot.max()) + 1),
            Row(
                case,
                "deferred chunks",
                None,
                sum(len(replica.encoder) - len(set(replica.microbatch)) for replica in replicas),
            ),
        ]
    return rows


def draw_schedules(folder: Path) -> None:
    """One picture per system: the slowest replica of figure 4.13's step."""
    for system, (stages, replicas) in systems(MAIN, False).items():
        _, timelines = vlm.iteration(stages, replicas, *costs(MAIN, False))
        slowest = max(timelines, key=lambda timeline: timeline.makespan)
        slowest.plot(folder / f"entrain-4.13-{system.replace(' ', '-').lower()}.png", title=f"{system}, {MAIN}")


def picture_claims(rows: Rows) -> list[Claim]:
    seconds = {case: rows.ours(case, "iteration") for case in rows.cases()}
    bubble = {case: rows.ours(case, "bubble of all ranks") for case in rows.cases()}
    return [
        Claim(
            f"the balanced schedule is the shortest ({MAIN})",
            "(figure)",
            ", ".join(f"{case} {each:.2f} s" for case, each in seconds.items()),
            min(seconds, key=lambda case: seconds[case]) == "Entrain",
        ),
        Claim(
            "and has the least bubble",
            "(figure)",
            ", ".join(f"{case} {each:.0%}" for case, each in bubble.items()),
            min(bubble, key=lambda case: bubble[case]) == "Entrain",
        ),
    ]


# ---------------------------------------------------------------------- figure 4.14


def memory(case: str, small: bool) -> list[Row]:
    """Peak GB of ranks: weights, gradients, optimizer and activations."""
    rows = []
    made = systems(case, small)
    stages, replicas = made["Entrain"]
    made["Entrain without deferral"] = (stages, [vlm.undeferred(replica) for replica in replicas])
    for system, (stages, replicas) in made.items():
        if system == "static 1F1B":
            continue
        peaks = np.array([held(case, small, stages, replica) for replica in replicas]).max(axis=0)
        state = state_bytes(stages)
        rows += [
            Row(case, f"{system}: fullest rank", None, float((peaks + state).max() / 1e9), "GB"),
            Row(case, f"{system}: activations, fullest rank", None, float(peaks.max() / 1e9), "GB"),
            Row(case, f"{system}: activations of the last rank", None, float(peaks[-1] / 1e9), "GB"),
        ]
    return rows


def held(case: str, small: bool, stages: vlm.Stages, replica: vlm.Replica) -> np.ndarray:
    """Peak bytes of activations on each rank of a replica."""
    dataset, model = PAIRS[case]
    own = vlm.work(dataset, model, sizes_of(small)[0], SEEDS["step"])
    timeline = vlm.play(stages, replica, *costs(case, small))
    table = timeline.table
    assert table is not None
    sides = {
        vlm.ENCODER: (own.patches[replica.samples], vlm.QWEN_VISION.hidden, stages.encoder),
        vlm.LLM: (own.tokens[replica.samples], vlm.LLAMA[model].hidden, stages.llm),
    }
    bytes_of = {}
    for place, chunk in enumerate(table.chunks):
        tokens, hidden, layers = sides[chunk.module]
        for stage, depth in enumerate(layers):
            count = int(tokens[chunk.samples].sum())
            bytes_of[chunk.module, stage, place] = float(LAYER_BYTES * hidden * count * depth) / vlm.TP
    return np.array(timeline.peak_memory(bytes_of))


def state_bytes(stages: vlm.Stages) -> np.ndarray:
    """Bytes of weights, gradients and optimizer state of each rank."""
    llm, shape = vlm.LLAMA[stages.model], vlm.QWEN_VISION
    encoder = stages.encoder * float(shape.layer_parameters)
    language = stages.llm * float(llm.layer_parameters)
    language[-1] += llm.hidden * llm.head
    parameters = encoder + language if stages.colocated else np.concatenate([encoder, language])
    return parameters * STATE_BYTES / vlm.TP


def memory_claims(rows: Rows) -> list[Claim]:
    case = rows.cases()[0]

    def gb(system: str, what: str) -> float:
        return float(rows.ours(case, f"{system}: {what}"))

    peak = {system: gb(system, "activations, fullest rank") for system in ("DistTrain", "DIP", "Entrain")}
    last = {system: gb(system, "activations of the last rank") for system in ("DistTrain", "DIP", "Entrain")}
    whole = gb("Entrain without deferral", "activations, fullest rank")
    more = peak["Entrain"] / whole - 1
    return [
        Claim(
            "the last rank holds more under DIP: the encoder's activations wait for all of the language model",
            "about 12 GB more",
            ", ".join(f"{system} {each:.1f} GB" for system, each in last.items()),
            last["DIP"] > 2 * max(last["DistTrain"], last["Entrain"]),
            "bytes per token and layer are assumed, so that only the order is compared",
        ),
        Claim(
            "DistTrain peaks higher than Entrain, as its microbatches are uneven",
            "(figure)",
            f"{peak['DistTrain']:.1f} GB against {peak['Entrain']:.1f} GB",
            peak["DistTrain"] > peak["Entrain"],
            ""
            if peak["DistTrain"] > peak["Entrain"]
            else f"what deferral adds (the next line): without it {whole:.1f} GB",
        ),
        Claim(
            "deferral hardly adds to the peak",
            "minuscule",
            f"{more:+.1%}",
            more < 0.1,
            ""
            if more < 0.1
            else "a deferred sample is an encoder chunk of its own here, its microbatch waits for the next one, and "
            "the generator then keeps more chunks in flight at the first stages",
        ),
    ]


# ---------------------------------------------------------------------- figure 4.15


def cuts(case: str, small: bool) -> list[Row]:
    """Samples per second of Entrain with each split of the lanes, and the split that profiling selects."""
    dataset, model = PAIRS[case]
    samples, replicas = sizes_of(small)
    vision, llm = costs(case, small)
    dealt = vlm.entrain(vision, llm, replicas, samples // replicas // 4)
    rows = []
    for encoder in (1, 4, 7) if small else range(1, LANES):
        seconds, _ = vlm.iteration(vlm.Stages.cut(model, encoder, LANES - encoder), dealt, vision, llm)
        rows.append(Row(case, f"{encoder}:{LANES - encoder}", None, float(samples / seconds), "samples/s"))
    each = np.stack(vlm.seconds(vlm.work(dataset, model, vlm.SAMPLES, SEEDS["trials"]), model), axis=1)
    result = plan.stable_batch_size(each, LANES)
    rows.append(Row(case, "chosen by search", None, searched(case, each.mean(axis=0))))
    rows.append(Row(case, "chosen by profiling", None, ":".join(map(str, result.allocation))))
    rows.append(Row(case, "profiling batch", 256, result.size, "samples"))
    return rows


def searched(case: str, sample: vlm.Floats) -> str:
    """The split that algorithm 3 finds (plan.search_configuration) at dp 4 and tp 2; sample: seconds in each module."""
    dataset, model = PAIRS[case]
    own, shape, samples = vlm.work(dataset, model, vlm.SAMPLES, SEEDS["trials"]), vlm.LLAMA[model], 4
    modules = {}
    for name, tokens, kind, seconds in (
        (vlm.ENCODER, own.patches, vlm.QWEN_VISION, sample[0]),
        (vlm.LLM, own.tokens, shape, sample[1]),
    ):
        work = np.ones(kind.layers)
        work[-1] += kind.hidden * kind.head / kind.layer_parameters
        forward = samples * seconds * work / work.sum()
        parameters = work * kind.layer_parameters
        input_bytes = np.full(kind.layers, 2.0 * kind.hidden * samples * float(tokens.mean()))
        modules[name] = plan.SearchModule(
            {(vlm.TP, 1): forward},
            {(vlm.TP, 1): 2 * forward},
            2 * parameters,
            2 * parameters,
            12 * parameters,
            LAYER_BYTES / 2 * input_bytes,
            input_bytes,
        )
    result = plan.search_configuration(
        modules, 4 * GPUS, batch=512, microbatch=samples, gpu_memory=GPU_BYTES, dp=(4,), language_model=vlm.LLM
    )
    return f"{result.specs[vlm.ENCODER].pp}:{result.specs[vlm.LLM].pp}"


def cut_claims(rows: Rows) -> list[Claim]:
    claims = []
    worst = 0.0
    apart: dict[str, dict[str, float]] = {"profiling": {}, "search": {}}
    for case in rows.cases():
        speed = {row.what: row.ours for row in rows if row.case == case and row.unit == "samples/s"}
        worst = max(worst, 1 - min(speed.values()) / max(speed.values()))
        for how, shares in apart.items():
            shares[case] = speed.get(rows.ours(case, f"chosen by {how}"), min(speed.values())) / max(speed.values())
    claims.append(Claim("a bad split costs most of the throughput", "85 %", f"{worst:.0%}", worst > 0.5))
    for how, shares in apart.items():
        far = [case for case, share in shares.items() if share < 0.999]
        claims.append(
            Claim(
                f"the split that {NAMED[how]} chooses is the best one",
                "for all data (figures 4.15, C.8 to C.10)",
                ", ".join(f"{case} {share:.0%} of the best" for case, share in shares.items()),
                not far,
                f"not for {', '.join(far)}: shares of the mean work are rounded, but stages are whole layers and the "
                "logits are one piece, so that the neighbouring split can have the shorter slowest stage"
                if far
                else "",
            )
        )
    sizes = [rows.ours(case, "profiling batch") for case in rows.cases()]
    claims.append(Claim("a batch of 256 is enough to choose", "256", ", ".join(map(str, sizes)), max(sizes) <= 256))
    return claims


_ASSUMED = (LENGTHS, RATES, SETTING, PLAY)

TABLES = (
    Table(
        "entrain-4.12",
        "dissertation figure 4.12, section 4.7.2",
        "Iteration time of each system on four data sets and two models.",
        tuple(CUTS),
        speeds,
        speed_claims,
        (*_ASSUMED, DIP),
        ("throughputs are drawn, not printed: of figures there is only 'up to 1.40 x'",),
    ),
    Table(
        "entrain-4.13",
        "dissertation figure 4.13, section 4.7.2",
        "The schedules of one step side by side.",
        ("DistTrain", "DIP", "Entrain"),
        pictures,
        picture_claims,
        (*_ASSUMED, DIP),
        ("the drawn step itself: its samples are not known",),
        draw=draw_schedules,
    ),
    Table(
        "entrain-4.14",
        "dissertation figure 4.14, section 4.7.2",
        "What ranks hold at most.",
        (MAIN,),
        memory,
        memory_claims,
        (
            *_ASSUMED,
            DIP,
            f"a layer keeps {LAYER_BYTES} bytes per token and unit of width, over TP {vlm.TP}; nothing is recomputed; "
            f"a parameter takes {STATE_BYTES} bytes",
        ),
        ("curves are drawn, not printed: of figures there is only 'about 12 GB' of DIP's last rank",),
    ),
    Table(
        "entrain-4.15",
        "dissertation figures 4.15 and C.8 to C.10, sections 4.7.3 and C.6",
        "Throughput of Entrain by how the GPUs are split.",
        tuple(case for case in CUTS if case.endswith("3b")),
        cuts,
        cut_claims,
        _ASSUMED,
        ("bars are drawn, not printed: of figures there is only the drop of 85 %",),
    ),
)
