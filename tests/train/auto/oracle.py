"""Oracle of layout = "auto": simulates every layout that can be listed at 4 ranks, and compares with `decide`. Other
schedules are sampled.

python -m tests.train.auto.oracle

writes oracle.json. For each case: the seconds of the best layout and of the chosen one, and the number of layouts.
A test decides again and simulates a sample of the layouts again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interlace.costs.links import Link, Links
from interlace.data import ByteTokenizer
from interlace.model import Media, Sample
from interlace.model.inputs.placeholders import token_ids
from interlace.plan import LinkModel
from interlace.train.auto.candidates import Candidate, listed, with_schedules
from interlace.train.auto.choose import Decision, decide, openings_of
from interlace.train.auto.evaluate import Evaluator, Refused
from interlace.train.auto.machine import Machine, counted
from interlace.train.auto.work import Work
from interlace.train.config.load import from_table
from interlace.train.config.sections import Config
from interlace.train.models.build import build
from tests.digits import DATA

FILE = Path(__file__).with_name("oracle.json")
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
WORLD = 4
OTHERS = 150
GB = 1e9
CASES: dict[str, dict[str, Any]] = {
    "equal modules": {"layers": (4, 4), "latency": 2e-6, "bandwidth": 5e9},
    "a deep language model": {"layers": (2, 6), "latency": 5e-6, "bandwidth": 2e9},
    "a frozen encoder, slow links": {"layers": (6, 2), "freeze": True, "latency": 5e-5, "bandwidth": 2e8},
}


def config_of(layers: tuple[int, int], freeze: bool = False, batch: int = 8, **parallel: Any) -> Config:
    """A config of the digits that leaves its layout open."""
    vision: dict[str, Any] = {"architecture": "SiglipVisionModel", "config": VISION | {"num_hidden_layers": layers[0]}}
    language = LLAMA | {"num_hidden_layers": layers[1], "max_position_embeddings": 64}
    table = {
        "run": {"name": "oracle"},
        "model": {
            "vision": vision | {"freeze": freeze},
            "language_model": {"architecture": "LlamaForCausalLM", "config": language},
        },
        "data": dict(DATA),
        "train": {"steps": 2, "batch_size": batch, "microbatches": 2, "activation_checkpointing": "none"},
        "parallel": {"layout": "auto", **parallel},
    }
    return from_table(table)


def model_of(config: Config) -> Any:
    """Its model, on the meta device."""
    return build(config, ByteTokenizer())


def work_of(model: Any, batch: int = 8) -> Work:
    """Two batches of images and texts of different lengths, identical in every process."""
    generator = torch.Generator().manual_seed(0)
    return Work(tuple([_sample(model, generator, i) for i in range(batch)] for _ in range(2)), "random samples")


def _sample(model: Any, generator: torch.Generator, index: int) -> Sample:
    """A text; three of four have an image."""
    shape = (3, 8, 8)
    count = model.encoders["vision"].tokens(shape)
    place = next(iter(token_ids(model.placeholders["vision"])))
    text = int(torch.randint(4, 24, (), generator=generator))
    labels = torch.full((count + text,), -100)
    labels[count:] = 1
    media = {"vision": [Media(shape, count)]} if index % 4 else {}
    ids = [place] * count * bool(media) + [1] * (text + count * (not media))
    return Sample(torch.tensor(ids), labels, media)


def machine_of(
    config: Config, model: Any, *, latency: float, bandwidth: float, memory: float = 80 * GB, tflops: float = 1e-3
) -> Machine:
    """Counted costs and one kind of link."""
    made = counted(config, model, tflops=tflops, memory=memory, how="as given")
    link = LinkModel(latency, 1 / bandwidth)
    links = Links(host=Link(link, link), overhead=latency / 10)
    return Machine(made.costs, lambda world: links, lambda world: memory, "as given", "cuda")


def everything(config: Config, world: int) -> Iterator[Candidate]:
    """All candidates of `world` ranks with the first schedule, and a seeded sample of them with the others."""
    first = list(listed(config.modules(), world, openings_of(config)))
    yield from first
    others = [other for candidate in first for other in with_schedules(candidate)]
    yield from random.Random(0).sample(others, min(OTHERS, len(others)))


def simulated(evaluator: Evaluator, candidates: Iterator[Candidate]) -> list[tuple[float, str]]:
    """Seconds and name of each candidate that can be simulated."""
    result = []
    for candidate in candidates:
        try:
            result.append((evaluator.simulate(candidate).seconds, str(candidate)))
        except Refused:
            continue
    return result


def case(name: str) -> tuple[Config, Any, Work, Machine]:
    """Inputs of the decision."""
    given = CASES[name]
    config = config_of(given["layers"], given.get("freeze", False))
    model = model_of(config)
    return config, model, work_of(model), machine_of(
        config, model, latency=given["latency"], bandwidth=given["bandwidth"]
    )  # fmt: skip


def decision_of(name: str) -> Decision:
    """The decision for exactly 4 ranks."""
    return decide(*case(name), [WORLD])


def main() -> None:
    """Simulates all candidates of all cases."""
    rows = {}
    for name in CASES:
        config, model, work, machine = case(name)
        result = simulated(Evaluator(config, model, work, machine), everything(config, WORLD))
        best, of = min(result)
        taken = decision_of(name).best
        rows[name] = {
            "possible": len(result),
            "best": best,
            "best_layout": of,
            "taken": taken.seconds,
            "taken_layout": str(taken.candidate),
        }
        print(name, rows[name], f"{taken.seconds / best:.4f}", file=sys.stderr, flush=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
