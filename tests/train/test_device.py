"""Device of a run, weights that are identical on all devices, and generators that move between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.train import device
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.config.load import ConfigError
from interlace.train.launch import launcher
from interlace.train.launch.startup import Startup
from interlace.train.models import random_weights as weights
from interlace.train.models.build import materialize
from tests import forkserver
from tests.tiny import tiny_mllm
from tests.train.build import _build, _config


def _machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "kind"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 1, 1, "cuda"),
        ("auto", 2, 1, "cpu"),
        ("auto", 2, 8, "cuda"),
        ("cpu", 1, 8, "cpu"),
        ("cuda", 8, 8, "cuda"),
    ],
)
def test_auto_is_a_gpu_for_each_rank_or_none(
    monkeypatch: pytest.MonkeyPatch, wanted: str, ranks: int, gpus: int, kind: str
) -> None:
    _machine(monkeypatch, gpus)
    assert device.choose(wanted, ranks) == kind


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 2)
    with pytest.raises(
        ConfigError, match=r"tiny.toml: .* each of the 3 ranks .* machine has 2; set run.device = 'cpu'"
    ):
        device.choose("cuda", 3, source="tiny.toml")
    _machine(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"each of the 1 rank on .* torch is built without CUDA; set run.device"):
        device.choose("cuda", 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="no GPU is usable here"):
        device.choose("cuda", 1)
    with pytest.raises(ConfigError, match=r"run\.device"):
        _config("run.device=gpu")


MIXED = """
import os, sys
from interlace.train import device
from interlace.train.launch import launcher
from interlace.train.launch.startup import Startup
rank = int(os.environ["RANK"])
kind = sys.argv[1 + rank]
# What a GPU's rank joins with, but for NCCL: the parts for CPU tensors have to find each other.
meeting = Startup(rank, 3, 20.0, {"cpu": "gloo", "cuda": "cpu:gloo,cuda:gloo"}[kind])
try:
    device.agree(kind, meeting, source="tiny.toml")
except ValueError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
os._exit(0)
"""


def test_machines_that_come_to_different_devices_are_told(tmp_path: Path) -> None:
    """On all ranks, also if the store ends with rank 0."""
    device.agree("cpu", Startup(0, 1, 20.0))
    met, kinds = launcher.rendezvous(3), ("cuda", "cpu", "cuda")
    processes = [
        forkserver.start_script(MIXED, tmp_path / str(rank), {**met, "RANK": str(rank)}, kinds) for rank in range(3)
    ]
    for rank, process in enumerate(processes):
        process.join(600)
        output = (tmp_path / str(rank)).read_text()
        assert "ConfigError: tiny.toml: rank 0 computes on a GPU, ranks [1] on the CPU: some machines" in output
        assert "set run.device = 'cpu'" in output


def test_weights_are_drawn_on_the_host_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any device, without changing the generator."""
    real, made, most = weights._on_the_host, list[StorageWeakRef](), 0

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        result = real(tensor)
        made.append(StorageWeakRef(result.untyped_storage()))
        most = max(most, sum(not each.expired() for each in made))
        return result

    monkeypatch.setattr(weights, "_on_the_host", watched)
    drawn = torch.get_rng_state()
    model = materialize(_build("model.vision.architecture=CLIPVisionModel"), seed=0, device="meta")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert len(made) >= len(list(model.parameters())) > 40
    assert most <= 20, "a layer at a time, not the model"


def test_a_gpus_generator_goes_along_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = ck.rng_state()
    assert "cuda" not in on_cpu
    state = torch.arange(16, dtype=torch.uint8)
    put: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put.append)
    on_gpu = ck.rng_state()
    assert {key: on_gpu[key] for key in on_cpu} == on_cpu
    ck.set_rng_state(on_gpu)
    assert len(put) == 1 and torch.equal(put[0], state)
    ck.set_rng_state(on_cpu)  # state of a CPU: the GPU's stays as seeded
    assert len(put) == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    ck.set_rng_state(on_gpu)  # state of a GPU, loaded on a CPU
    assert len(put) == 1


def test_kernels_are_compiled_for_what_this_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the heads of one rank of a lane; without gradients for a frozen tower. A failing compiler does not end the
    run.
    """
    from interlace.layout import Layout, ParallelSpec
    from interlace.run import parallelize

    asked: list[dict[str, object]] = []

    def warm_up(**options: object) -> int:
        asked.append(options)
        if options["q_heads"] == 4:
            raise RuntimeError("ptxas\nfailed")
        return 3

    monkeypatch.setattr("interlace.attention.warm_up", warm_up)
    mllm = tiny_mllm(hidden=32, heads=4, kv_heads=2)
    mllm.freeze("audio")
    specs = {"vision": ParallelSpec(), "audio": ParallelSpec(), "language_model": ParallelSpec(tp=2)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs))
    lines: list[str] = []
    device.warm_up_attention(parallel, torch.device("cpu"), "bf16", lines.append)
    assert asked == lines == []
    device.warm_up_attention(parallel, torch.device("cuda"), "bf16", lines.append)
    result = {(each["q_heads"], each["kv_heads"], each["head_dim"], each["backward"]) for each in asked}
    assert result == {(4, 4, 8, True), (4, 4, 8, False), (2, 1, 8, True)}
    assert {each["dtype"] for each in asked} == {torch.bfloat16}
    reason = "attention kernels were not precompiled: ptxas failed"
    assert lines == [f"vision: {reason}", f"audio: {reason}"]
