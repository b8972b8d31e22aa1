"""How much memory a rank takes while it makes or loads its pieces: hardly more than these, never a whole module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from interlace.run import parallelize
from interlace.train.build import build, build_layout, initialize
from interlace.train.checkpoint.checkpoints import Checkpoints
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.pieces import pieces_of
from tests.distributed.workers import run_ranks
from tests.train.test_lanes import config_of


def resident(key: str) -> int:
    """VmRSS or VmHWM (the most since it was last reset) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(key)


def lane_of(tokenizer: Any, hidden: int, layers: int) -> tuple[Any, Any]:
    """A model on meta, and a layout of two ranks that hold half of it each."""
    sizes = f"hidden_size={hidden}, intermediate_size={4 * hidden}, num_hidden_layers={layers}, num_attention_heads=4"
    config = config_of("tp2", f"model.language_model.config={{{sizes}}}")
    model = build(config, tokenizer)
    return model, build_layout(config, model)


def of_lane(rank: int, folder: str, load: bool) -> tuple[int, int]:
    """(the most memory that was taken at a time, the rank's weights), in bytes."""
    from interlace.data import ByteTokenizer

    tokenizer = ByteTokenizer()
    initialize(parallelize(*lane_of(tokenizer, 16, 1), timeout=60), seed=0)  # what is imported on the way is no weight
    model, layout = lane_of(tokenizer, 256, 24)
    store = Checkpoints(Path(folder), keep=1, identity=identity_of(model, {}))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    parallel = parallelize(model, layout, timeout=60)
    weights: Any = pieces_of(dict(parallel.named_parameters()), parallel.regions())
    if load:
        path = store.newest()
        assert path is not None
        store.load(path, weights, {})
    else:
        initialize(parallel, seed=0)
    most = resident("VmHWM") - before
    if not load:
        store.save(1, weights, {}, {})
    parameters = [parameter for _, parameter in parallel.named_parameters()]
    assert not any(bool(parameter.isnan().any()) for parameter in parameters)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)
    assert all(p.is_meta or p.shape == dict(parallel.named_parameters())[n].shape for n, p in model.named_parameters())
    return most, sum(parameter.nbytes for parameter in parameters)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="this system does not tell peaks of memory")
def test_a_rank_takes_the_memory_of_its_pieces_and_little_more(tmp_path: Path) -> None:
    for load in (False, True):
        for kind, value in run_ranks(2, of_lane, str(tmp_path), load):
            assert kind == "returned", value
            most, weights = value
            assert weights > 45e6, weights
            assert 0.9 * weights < most <= 1.3 * weights, f"{most / weights:.2f} of the weights, load = {load}"
