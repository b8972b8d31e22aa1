"""OrchMLLM's figures 3 and 8 to 13: post-balancing against none, pre-balancing, rigid algorithms and all-gather."""

from __future__ import annotations

import numpy as np

from bench.papers import mllm
from bench.papers.frame import Claim, Row, Rows, Table, ahead, behind, rises
from bench.papers.mllm import MODELS, NODE, PHASES, Batch, Model
from bench.scheduling_balance import internode_volume
from interlace import balance
from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import simulate

GPUS = 2560  # 8.1
ABLATION_GPUS = 128  # 8.3
STEPS = 3  # drawn for each figure
TP = 8
GPU_BYTES = 80e9  # an H100's
STATE_BYTES = 16  # per parameter: bf16 weight and gradient, fp32 weight and Adam's two moments
LINK = 50e9  # bytes per second of a GPU between nodes: 8 x 400 Gbps for 8 GPUs (section 8)
PATCH_BYTES = 14 * 14 * 3 * 2
FRAME_BYTES = 2 * 128 * 2  # of a token of Whisper's encoder: two frames of 128 mels

DATA = (
    "lengths are drawn from bench/lengths.py (mix omni), pictures about 640 x 480 before the bound on their size: the "
    "paper prints no statistics of LLaVA-1.5, LibriSpeech and AIR-Bench as it mixes them"
)
RATE = (
    f"ranks compute at {mllm.EFFICIENCY:.0%} of the peak in all phases (assumed), a backward takes twice its "
    "forward, nothing is recomputed; every phase waits for its slowest rank, since weights are gathered layer by layer"
)
FREE = "gathering weights is hidden and dispatching rows is free, but for orchmllm-12"


def _gpus(count: int, small: bool) -> int:
    return 16 if small else count


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


# ---------------------------------------------------------------------- figure 3


def composition(case: str, small: bool) -> list[Row]:
    """Fraction of the language model's sequence that belongs to the modality, over samples."""
    model = MODELS["MLLM-10B"]
    batch = mllm.drawn(model, 4 if small else 256, 80, 0)
    merge = model.merge[0 if case == "vision" else 1]
    share = -(-batch.tokens[case] // merge) / batch.tokens["llm"]
    rows = [
        Row(case, "mean", None, float(share.mean())),
        Row(case, "standard deviation", None, float(share.std())),
        Row(case, "samples without any", None, float((share == 0).mean())),
    ]
    return rows + [
        Row(case, f"{q} % of samples are below", None, float(np.quantile(share, q / 100))) for q in (25, 50, 75)
    ]


def composition_claims(rows: Rows) -> list[Claim]:
    return [
        Claim(
            f"the share of {case} in a sequence varies substantially",
            "(figure)",
            f"{rows.ours(case, 'mean'):.2f} +- {rows.ours(case, 'standard deviation'):.2f}",
            rows.ours(case, "standard deviation") > 0.5 * rows.ours(case, "mean"),
        )
        for case in rows.cases()
    ]


# ---------------------------------------------------------------------- figures 8 and 9


def overall(case: str, small: bool) -> list[Row]:
    """MFU and throughput on the whole cluster, each system with its printed batch."""
    model, gpus = MODELS[case], _gpus(GPUS, small)
    result: dict[str, list[tuple[float, float]]] = {"OrchMLLM": [], "no balance": [], "Megatron-LM": []}
    for seed in range(1 if small else STEPS):
        for system, how, each in (("OrchMLLM", "all", model.batch), ("no balance", "none", model.unbalanced_batch)):
            batch = mllm.drawn(model, gpus, each, seed)
            made = mllm.step(model, batch, mllm.dealt(model, batch, how, nodewise=False), simulated=False)
            result[system].append((made.mfu, made.throughput))
        result["Megatron-LM"].append(megatron(model, gpus, seed))
    printed = 0.416 if case == "MLLM-84B" else None
    rows = []
    for system, values in result.items():
        rows.append(
            Row(case, f"{system} MFU", printed if system == "OrchMLLM" else None, _mean([a for a, _ in values]))
        )
        rows.append(Row(case, f"{system} throughput", None, _mean([b for _, b in values]), "tokens/s/GPU"))
    return rows


def megatron(model: Model, gpus: int, seed: int) -> tuple[float, float]:
    """(MFU, tokens per second and GPU) of pipelines: encoders on the first stage, layers of the LLM on the others.

    Microbatches of one sample under 1F1B. Replicas wait for each other at the end; TP is free.
    """
    replicas = max(1, gpus // (TP * model.megatron_stages))
    each = model.megatron_batch * replicas // (GPUS // (TP * model.megatron_stages)) // replicas
    batch = mllm.drawn(model, replicas, each, seed)
    work = {
        phase: model.shape(phase).linear() * batch.tokens[phase]
        + model.shape(phase).quadratic(phase == "llm") * batch.tokens[phase].astype(float) ** 2
        for phase in PHASES
    }
    deep = model.megatron_stages - 1
    graph = StageGraph.build(
        {"vision": [0], "audio": [0], "llm": list(range(1, deep + 1))}, [("vision", "llm"), ("audio", "llm")]
    )
    longest = 0.0
    for replica in range(replicas):
        own = np.flatnonzero(batch.home == replica)
        table = StepTable.aligned(graph.links, [[p for p in PHASES if batch.tokens[p][i]] for i in own])
        seconds = [
            float(work[chunk.module][own[chunk.samples[0]]]) / (TP * mllm.PEAK * mllm.EFFICIENCY)
            for chunk in table.chunks
        ]

        def duration(op: Op, module: str, stage: int, chunk: int, seconds: list[float] = seconds) -> float:
            return seconds[chunk] / (deep if module == "llm" else 1) * (1.0 if op is Op.FORWARD else 2.0)

        schedule = one_f_one_b(graph, table, reduce_grad=False, durations=duration)
        longest = max(longest, simulate(schedule, duration).makespan)
    used = replicas * TP * model.megatron_stages
    useful = 3 * sum(float(each.sum()) for each in work.values())
    return useful / (longest * used * mllm.PEAK), float(batch.tokens["llm"].sum()) / longest / used


def overall_claims(rows: Rows, what: str, over_none: str, over_megatron: str) -> list[Claim]:
    cases = rows.cases()
    claims = []
    for other, said in (("no balance", over_none), ("Megatron-LM", over_megatron)):
        ratio = [rows.ours(case, f"OrchMLLM {what}") / rows.ours(case, f"{other} {what}") for case in cases]
        why = ""
        if other == "Megatron-LM":
            why = (
                "smaller than printed: tensor parallelism over 8 GPUs and small kernels cost nothing here; what shows "
                "is the uneven stages and samples alone"
            )
        elif max(ratio) < 1.8:
            why = (
                "smaller than printed: lengths at random leave the slowest rank less behind than theirs did, and the "
                "memory that balance frees counts only as the larger printed batch"
            )
        claims.append(
            Claim(
                f"{what} of OrchMLLM over {other}, {', '.join(cases)}",
                said,
                ", ".join(f"{each:.2f} x" for each in ratio),
                ahead(min(ratio)),
                why,
            )
        )
        if other == "no balance":
            claims.append(
                Claim(
                    f"the advantage in {what} grows with the model",
                    "yes",
                    "yes" if rises(ratio) else "no",
                    rises(ratio),
                )
            )
    return claims


def mfu_claims(rows: Rows) -> list[Claim]:
    large = rows.cases()[-1]
    ours = rows.ours(large, "OrchMLLM MFU")
    result = overall_claims(rows, "MFU", "1.5 to 2.0 x", "3.1 to 4.1 x")
    return [
        *result,
        Claim(
            f"MFU of OrchMLLM, {large}",
            "41.6 %",
            f"{ours:.1%}",
            ours > 0.95 * mllm.EFFICIENCY,
            f"the level is the assumed {mllm.EFFICIENCY:.0%} of the peak; what shows is that balance leaves nearly all",
            assumed=True,
        ),
    ]


def throughput_claims(rows: Rows) -> list[Claim]:
    return overall_claims(rows, "throughput", "1.4 to 1.9 x", "3.1 to 4.2 x")


# ---------------------------------------------------------------------- figures 10 and 11


def ablation(case: str, small: bool, ways: dict[str, str]) -> list[Row]:
    """MFU of each assignment of samples on 128 GPUs, and the excess of the fullest rank over the mean."""
    model, gpus = MODELS[case], _gpus(ABLATION_GPUS, small)
    rows = []
    for name, how in ways.items():
        steps = []
        for seed in range(1 if small else STEPS):
            batch = mllm.drawn(model, gpus, model.ablation_batch, seed)
            steps.append(mllm.step(model, batch, mllm.dealt(model, batch, how)))
        rows.append(Row(case, f"{name}: MFU", None, _mean([step.mfu for step in steps])))
        loose = _mean([step.useful / (step.loose * gpus * mllm.PEAK) for step in steps])
        rows.append(Row(case, f"{name}: MFU if ranks wait for rows alone (simulated)", None, loose))
        for phase in PHASES:
            fullest = _mean([step.fullest[phase] for step in steps])
            rows.append(Row(case, f"{name}: {phase} tokens of the fullest rank over the mean", None, fullest))
    return rows


def encoders(case: str, small: bool) -> list[Row]:
    return ablation(case, small, {"OrchMLLM": "all", "only LLM balanced": "llm"})


def encoder_claims(rows: Rows) -> list[Claim]:
    cases = rows.cases()
    ratio = [rows.ours(case, "OrchMLLM: MFU") / rows.ours(case, "only LLM balanced: MFU") for case in cases]
    loose = [
        rows.ours(case, "OrchMLLM: MFU if ranks wait for rows alone (simulated)")
        / rows.ours(case, "only LLM balanced: MFU if ranks wait for rows alone (simulated)")
        for case in cases
    ]
    full = [
        max(rows.ours(case, f"only LLM balanced: {phase} tokens of the fullest rank over the mean") for phase in PHASES)
        for case in cases
    ]
    even = [
        max(rows.ours(case, f"OrchMLLM: {phase} tokens of the fullest rank over the mean") for phase in PHASES)
        for case in cases
    ]
    return [
        Claim(
            f"balanced encoders raise MFU over a balanced LLM alone, {', '.join(cases)}",
            "(figure)",
            ", ".join(f"{each:.2f} x" for each in ratio)
            + "; without waits at phases "
            + ", ".join(f"{each:.2f} x" for each in loose),
            ahead(min(*ratio, *loose)),
        ),
        Claim(
            "and the more, the larger the model",
            "yes",
            "yes" if rises(ratio) else "no",
            rises(ratio),
        ),
        Claim(
            "and lower the memory of the fullest rank (tokens of its fullest phase over the mean)",
            "(figure; MLLM-84B runs out of memory)",
            ", ".join(f"{a:.2f} against {b:.2f}" for a, b in zip(even, full)),
            all(behind(a / b) for a, b in zip(even, full)),
        ),
    ]


def algorithms(case: str, small: bool) -> list[Row]:
    return ablation(case, small, {"tailored": "all", "all rmpad": "all rmpad", "all pad": "all pad"})


def algorithm_claims(rows: Rows) -> list[Claim]:
    cases = rows.cases()
    claims = []
    for rigid in ("all rmpad", "all pad"):
        ratio = [rows.ours(case, f"{rigid}: MFU") / rows.ours(case, "tailored: MFU") for case in cases]
        claims.append(
            Claim(
                f"MFU of {rigid} is below that of tailored algorithms, {', '.join(cases)}",
                "significantly (figure)",
                ", ".join(f"{each:.1%} of it" for each in ratio),
                behind(max(ratio)),
                ""
                if behind(max(ratio))
                else "no difference: among pictures of much the same size, batches alike when padded are alike when "
                "packed",
            )
        )
    return claims


# ---------------------------------------------------------------------- figures 12 and 13


def volumes(model: Model, batch: Batch, phase: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes that a rank holds of each new batch of a phase, node-wise assignment of batches to ranks)."""
    of = mllm.balanced(model, batch, phase, mllm.PADDED[phase], False)
    own = np.flatnonzero(batch.tokens[phase])
    size = {"vision": PATCH_BYTES, "audio": FRAME_BYTES, "llm": 2 * model.llm.hidden}[phase] * batch.tokens[phase][own]
    volume = balance.rearrangement_volume(batch.home[own], of[own], size, batch.ranks)
    return volume, balance.nodewise_placement(volume, NODE)


def gathered(case: str, small: bool) -> list[Row]:
    """Traffic into the fullest rank and the resulting loss of MFU: node-wise all-to-all against all-gather."""
    model, gpus = MODELS[case], _gpus(ABLATION_GPUS, small)
    sums: dict[str, list[float]] = {}
    for seed in range(1 if small else STEPS):
        batch = mllm.drawn(model, gpus, model.ablation_batch, seed)
        step = mllm.step(model, batch, mllm.dealt(model, batch, "all"), simulated=False)
        received, waited = {"all-to-all": 0.0, "all-gather": 0.0}, {"all-to-all": 0.0, "all-gather": 0.0}
        for phase in PHASES:
            volume, placement = volumes(model, batch, phase)
            back = 2 if phase == "llm" else 1  # gradients of rows are sent back
            received["all-to-all"] += float(volume.sum(axis=0).max())
            received["all-gather"] += float(volume.sum())
            waited["all-to-all"] += back * float(internode_volume(volume, placement, NODE).max()) / LINK
            waited["all-gather"] += back * float(volume.sum()) * (1 - NODE / gpus) / (NODE * LINK)
        for name in received:
            seconds = step.seconds + waited[name]
            sums.setdefault(f"{name}: MFU", []).append(step.useful / (seconds * gpus * mllm.PEAK))
            sums.setdefault(f"{name}: received by the fullest rank", []).append(received[name] / 1e9)
            sums.setdefault(f"{name}: exchange", []).append(waited[name] * 1e3)
    units = {"MFU": "", "received by the fullest rank": "GB", "exchange": "ms"}
    return [Row(case, name, None, _mean(values), units[name.split(": ")[1]]) for name, values in sums.items()]


def gathered_claims(rows: Rows) -> list[Claim]:
    cases = rows.cases()
    mfu = [rows.ours(case, "all-gather: MFU") / rows.ours(case, "all-to-all: MFU") for case in cases]
    memory = [
        [rows.ours(case, f"{name}: received by the fullest rank") for case in cases]
        for name in ("all-to-all", "all-gather")
    ]
    state = (
        STATE_BYTES * sum(MODELS[cases[-1]].billions) / ABLATION_GPUS
    )  # GB of a rank: all are sharded over all ranks
    return [
        Claim(
            f"MFU with all-gather is below that with all-to-all, {', '.join(cases)}",
            "(figure)",
            ", ".join(f"{each:.1%} of it" for each in mfu),
            behind(max(mfu)),
            "the whole batch crosses a node's links once here, at their full bandwidth; real collectives are slower",
        ),
        Claim(
            "and its buffers take many times the memory",
            "(figure)",
            ", ".join(f"{b:.1f} GB against {a:.2f} GB" for a, b in zip(*memory)),
            all(b > 10 * a for a, b in zip(*memory)),
        ),
        Claim(
            f"{cases[-1]}: weights, gradients, optimizer state and these buffers do not fit into a GPU",
            "out of memory",
            f"{state:.1f} GB + {memory[1][-1]:.1f} GB of {GPU_BYTES / 1e9:.0f} GB",
            state * 1e9 + memory[1][-1] * 1e9 > GPU_BYTES,
            "what is left would have to be filled by activations, which are not modelled: the paper chose batches that "
            "fill the memory without these buffers",
        ),
    ]


def nodewise(case: str, small: bool) -> list[Row]:
    """Inter-node traffic of the rank that sends most, node-wise relative to without."""
    model, gpus = MODELS[case], _gpus(ABLATION_GPUS, small)
    rows = []
    for phase in PHASES:
        most, mean = [], []
        for seed in range(1 if small else STEPS):
            volume, placement = volumes(model, mllm.drawn(model, gpus, model.ablation_batch, seed), phase)
            before, after = (internode_volume(volume, p, NODE) for p in (np.arange(gpus), placement))
            most.append(float(after.max() / before.max()))
            mean.append(float(after.mean() / before.mean()))
        rows.append(Row(case, f"{phase}: most of a rank, over without", "0.436 to 0.722", _mean(most)))
        rows.append(Row(case, f"{phase}: mean of ranks, over without", None, _mean(mean)))
    return rows


def nodewise_claims(rows: Rows) -> list[Claim]:
    most = [row.ours for row in rows if "most of a rank" in row.what]
    return [
        Claim(
            "the node-wise rearrangement lowers what crosses nodes, for every modality and model",
            "0.436 to 0.722",
            f"to {min(most):.3f} to {max(most):.3f} of it",
            behind(max(most)),
            "of 128 ranks each new batch takes samples from nearly all, so that no node holds much of one; which way "
            "the paper counts its reduction and how its samples cluster is not said",
        )
    ]


TABLES = (
    Table(
        "orchmllm-3",
        "OrchMLLM figure 3, section 3.1",
        "Share of a modality in the sequence, sample by sample.",
        ("vision", "audio"),
        composition,
        composition_claims,
        (DATA,),
        ("histograms are drawn, not printed: only that the shares vary is compared",),
    ),
    Table(
        "orchmllm-8",
        "OrchMLLM figure 8, section 8.1",
        "MFU on 2,560 GPUs.",
        tuple(MODELS),
        overall,
        mfu_claims,
        (
            DATA,
            RATE,
            FREE,
            "Megatron-LM: microbatches of one sample, encoders on the first stage, tensor parallelism free",
        ),
        ("the level of MFU: it is the assumed efficiency",),
    ),
    Table(
        "orchmllm-9",
        "OrchMLLM figure 9, section 8.1",
        "Tokens per second and GPU on 2,560 GPUs.",
        tuple(MODELS),
        overall,
        throughput_claims,
        (
            DATA,
            RATE,
            FREE,
            "Megatron-LM: microbatches of one sample, encoders on the first stage, tensor parallelism free",
        ),
        ("the level of throughput: it follows from the assumed efficiency",),
    ),
    Table(
        "orchmllm-10",
        "OrchMLLM figure 10, section 8.3",
        "Balanced encoders against pre-balancing (only the language model is balanced).",
        tuple(MODELS),
        encoders,
        encoder_claims,
        (DATA, RATE, FREE),
        ("GB of a GPU, and where memory runs out: what FSDP keeps is not said; tokens are compared instead",),
    ),
    Table(
        "orchmllm-11",
        "OrchMLLM figure 11, section 8.3",
        "One algorithm for all encoders against tailored ones.",
        tuple(MODELS),
        algorithms,
        algorithm_claims,
        (DATA, RATE, FREE),
    ),
    Table(
        "orchmllm-12",
        "OrchMLLM figure 12, section 8.3",
        "Dispatching with all-gather instead of all-to-all.",
        tuple(MODELS),
        gathered,
        gathered_claims,
        (
            DATA,
            RATE,
            f"{LINK / 1e9:.0f} GB/s per GPU between nodes, nothing within them; patches and mel frames travel to "
            "encoders, rows in bf16 to the language model and back, all from the rank that drew the sample",
        ),
        ("MFU under memory limits (25.51 % of MLLM-84B with a batch of 20): what FSDP keeps is not said",),
    ),
    Table(
        "orchmllm-13",
        "OrchMLLM figure 13, section 8.3",
        "Volume between nodes with and without the node-wise rearrangement.",
        tuple(MODELS),
        nodewise,
        nodewise_claims,
        (DATA,),
        ("volumes in bytes: they are drawn, not printed",),
    ),
)
