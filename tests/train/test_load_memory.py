"""Memory of a rank while it makes or loads its part of the weights: little overhead, never a whole module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from interlace.run import parallelize
from interlace.train.checkpoint.checkpoints import Checkpoints
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.pieces import pieces_of
from interlace.train.models.build import build, build_layout, initialize, materialize, stored_weights
from tests.distributed.workers import run_ranks
from tests.train.lanes import config_of


def resident(key: str) -> int:
    """VmRSS or VmHWM (the maximum since its last reset) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(key)


DEGREES = {"tp2": "{tp=2}", "full": '{dp=4, shard="full"}', "full tp2": '{tp=2, dp=2, shard="full"}'}
"""Of all modules, which share their ranks."""
RANKS = {"tp2": 2, "full": 4, "full tp2": 4}


def part_of(tokenizer: Any, layout: str, hidden: int, layers: int, path: Path | None = None) -> tuple[Any, Any, Any]:
    """A model on meta, a layout of ranks with equal parts of it, and the place of its weights if `path` is given."""
    sizes = f"hidden_size={hidden}, intermediate_size={4 * hidden}, num_hidden_layers={layers}, num_attention_heads=4"
    degrees = [f"parallel.{module}={DEGREES[layout]}" for module in ("vision", "language_model")]
    paths = [] if path is None else [f"model.language_model.path={path}"]
    config = config_of("tp2", f"model.language_model.config={{{sizes}}}", *degrees, *paths)
    model = build(config, tokenizer)
    return model, build_layout(config, model), stored_weights(config, model)


def of_rank(rank: int, layout: str, folder: str, source: str) -> tuple[int, int]:
    """(peak memory, the rank's weights), in bytes."""
    from interlace.data import ByteTokenizer

    tokenizer, layers = ByteTokenizer(), 12 * RANKS[layout]
    # Excludes imports from the measurement.
    initialize(parallelize(*part_of(tokenizer, layout, 16, 1)[:2], timeout=60), seed=0)
    path = Path(folder) / "language_model" if source == "folder" else None
    model, placed, stored = part_of(tokenizer, layout, 256, layers, path)
    store = Checkpoints(Path(folder), keep=1, identity=identity_of(model, {}))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    parallel = parallelize(model, placed, timeout=60)
    weights: Any = pieces_of(dict(parallel.named_parameters()), parallel.regions())
    if source == "checkpoint":
        newest = store.newest()
        assert newest is not None
        store.load(newest, weights, {})
    else:
        initialize(parallel, seed=0, stored=stored)
    most = resident("VmHWM") - before
    if source == "random":
        store.save(1, weights, {}, {})
    parameters = [parameter for _, parameter in parallel.named_parameters()]
    assert not any(bool(parameter.isnan().any()) for parameter in parameters)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)
    held = {parameter.data_ptr() for parameter in parameters}
    assert all(
        p.is_meta or p.data_ptr() in held or p.untyped_storage().nbytes() == p.itemsize for p in model.parameters()
    )
    return most, sum(parameter.nbytes for parameter in parameters)


def write_language_model(folder: Path, layers: int) -> None:
    """A HuggingFace folder of the language model, in several files."""
    from interlace.data import ByteTokenizer

    model, _, _ = part_of(ByteTokenizer(), "tp2", 256, layers)
    materialize(model, seed=1).language_model.save_pretrained(folder, max_shard_size="40MB")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="this system does not tell peaks of memory")
@pytest.mark.parametrize("layout", DEGREES)
def test_a_rank_takes_the_memory_of_its_part_and_little_more(tmp_path: Path, layout: str) -> None:
    write_language_model(tmp_path / "language_model", 12 * RANKS[layout])
    for source in ("random", "checkpoint", "folder"):
        for kind, value in run_ranks(RANKS[layout], of_rank, layout, str(tmp_path), source):
            assert kind == "returned", value
            most, weights = value
            assert weights > 45e6, weights
            # Only the process's free memory may reduce it; much less would mean that nothing was measured.
            assert 0.8 * weights < most <= 1.3 * weights, f"{most / weights:.2f} of the weights, {source}"
