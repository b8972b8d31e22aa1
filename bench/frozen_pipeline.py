"""Frozen-aware against frozen-unaware cuts, measured side by side (dissertation 3.3.1, cornstarch-2025-03 4.2).

A frozen vision encoder and a frozen language model with a trainable projector between them run as a pipeline of
2 gloo ranks with 1 thread each. The unaware cut balances forward + backward = 3 x forward, as LLM pipelines do. The
aware cut balances the actual work of each layer. Steps of the two alternate in one run, so that both see the same
machine load. The simulator's prediction from profiled layers is listed beside each measurement.

    python -m bench.frozen_pipeline [--microbatches 24] [--steps 7] [--out bench/results/frozen_pipeline.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from bench.measure import command, free_port, join_group, machine, versions, write_json
from interlace.layout import Layout
from interlace.model import Media, ModalityModule, MultimodalModel, Sample
from interlace.plan import profile_model
from interlace.run import parallelize, stage_durations, stage_graph
from interlace.schedule import StepTable, one_f_one_b
from interlace.simulate import simulate

IMAGE_TOKEN = 500
PATCH = 16
CUTS = {"unaware": False, "aware": True}


def build_model(vision_layers: int, language_layers: int, hidden: int = 256) -> MultimodalModel:
    """SigLIP and Llama of equal width, everything frozen but the projector."""
    torch.manual_seed(0)
    vision = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=vision_layers,
            num_attention_heads=4,
            image_size=16 * PATCH,
            patch_size=PATCH,
            vision_use_head=False,
            attn_implementation="interlace",
        )
    )
    language_model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=language_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            attn_implementation="interlace",
        )
    )
    mllm = MultimodalModel(
        encoders={"vision": ModalityModule(vision, projector="mlp")},
        language_model=language_model,
        placeholders={"vision": IMAGE_TOKEN},
    )
    mllm.freeze("vision")
    mllm.freeze("language_model")
    return mllm.train()


def build_samples(mllm: MultimodalModel, count: int) -> list[Sample]:
    """One per microbatch: an image of 16 x 16 patches and 64 text tokens, all equal so that only the cut differs."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 16 * PATCH, 16 * PATCH)
    tokens = mllm.encoders["vision"].tokens(shape)
    samples = []
    for _ in range(count):
        ids = [1, *[IMAGE_TOKEN] * tokens, *torch.randint(2, 400, (64,), generator=generator).tolist()]
        labels = torch.tensor([-100] * (tokens + 1) + ids[tokens + 2 :] + [2])
        image = Media(shape, tokens, torch.randn(shape, generator=generator))
        samples.append(Sample(input_ids=torch.tensor(ids), labels=labels, media={"vision": [image]}, name="bench"))
    return samples


def run_rank(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One rank: profile, then alternate steps of both cuts; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    join_group(rank, 2, port, 300)
    mllm = build_model(options.vision_layers, options.language_layers)
    samples = build_samples(mllm, options.microbatches)

    # Both ranks profile at the same time: layers then cost the same as in a step, when both cores are busy.
    dist.barrier()
    measured = profile_model(mllm, samples[:1], repeats=options.profile_repeats)
    shared = [measured]
    dist.broadcast_object_list(shared, src=0)  # one profile, so that all ranks compute the same cuts
    costs = shared[0]

    parallel, predicted, cuts = {}, {}, {}
    for name, aware in CUTS.items():
        recompute = options.checkpointing
        layout = Layout.balanced(mllm, 2, costs=costs, frozen_aware=aware, recompute=recompute)
        kept = "full" if recompute else "none"
        parallel[name] = parallelize(mllm, layout, transport="distributed", checkpointing=kept, timeout=120)
        graph = stage_graph(mllm, layout)
        schedule = one_f_one_b(graph, StepTable.aligned(graph.links, [graph.modules] * options.microbatches))
        predicted[name] = simulate(schedule, stage_durations(mllm, layout, costs, recompute=recompute)).makespan
        cuts[name] = [f"rank {s.lane}: {s.module}[{s.start}:{s.stop}]" for s in layout.stages()]

    seconds: dict[str, list[float]] = {name: [] for name in CUTS}
    bubbles: dict[str, list[float]] = {name: [] for name in CUTS}
    for step in range(options.steps + 1):  # the first one warms up
        for name, model in parallel.items():
            model.zero_grad()
            dist.barrier()
            start = time.monotonic()
            model.step(samples, microbatches=options.microbatches)
            dist.barrier()
            elapsed = time.monotonic() - start
            timeline = model.timeline()
            if step:
                seconds[name].append(elapsed)
                bubbles[name].append(timeline.bubble)
    if rank == 0:
        report: dict[str, Any] = {"cuts": cuts, "seconds": seconds, "predicted_seconds": predicted, "bubble": bubbles}
        Path(result).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the table, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=24, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each cut")
    parser.add_argument("--profile-repeats", type=int, default=9, help="repeats of the layer profile")
    parser.add_argument("--vision-layers", type=int, default=14)
    parser.add_argument("--language-layers", type=int, default=9)
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute activations: a frozen encoder has none to recompute, which an unaware cut does not see",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/frozen_pipeline.json"))
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options, result), nprocs=2)
        report = json.loads(Path(result).read_text())

    median = {name: statistics.median(report["seconds"][name]) for name in CUTS}
    ratios = [slow / fast for slow, fast in zip(report["seconds"]["unaware"], report["seconds"]["aware"], strict=True)]
    report = {
        "benchmark": "frozen_pipeline",
        "command": command("frozen_pipeline", argv),
        "machine": {**machine(), "ranks": 2, "threads_per_rank": 1},
        "versions": versions("torch"),
        "model": {
            "vision_layers": options.vision_layers,
            "language_layers": options.language_layers,
            "frozen": ["vision", "language_model"],
            "trainable": ["vision.projector"],
            "microbatches": options.microbatches,
            "activation_checkpointing": "full" if options.checkpointing else "none",
        },
        **report,
        "median_seconds": median,
        "speedup": median["unaware"] / median["aware"],
        "speedup_per_pair": ratios,
        "prediction_error": {name: report["predicted_seconds"][name] / median[name] - 1 for name in CUTS},
    }
    for name in CUTS:
        print(
            f"{name:8} {median[name] * 1e3:8.1f} ms/step, predicted {report['predicted_seconds'][name] * 1e3:8.1f} ms "
            f"({report['prediction_error'][name]:+.1%}), bubble {statistics.median(report['bubble'][name]):.0%}  "
            + ", ".join(report["cuts"][name])
        )
    print(f"frozen-aware is {report['speedup']:.2f}x faster (pairs {min(ratios):.2f} to {max(ratios):.2f})")
    write_json(options.out, report)
    return report


def test_frozen_pipeline(benchmark: Any) -> None:
    """The same under pytest-benchmark, shorter."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "frozen_pipeline.json")
        report = benchmark.pedantic(lambda: main(["--steps", "3", "--out", out]), rounds=1)
    benchmark.extra_info["speedup"] = report["speedup"]


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
