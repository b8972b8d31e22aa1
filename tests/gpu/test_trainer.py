"""Steps and whole runs on a GPU against the CPU and one process. INTERLACE_GPU_TESTS_ON=cpu rehearses them on a CPU.

Whole runs need the requirements of `interlace train` (pydantic, scikit-learn), which bare machines lack; steps need
transformers.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.comm.transports.choose import capabilities
from tests.distributed.workers import run_ranks
from tests.gpu import dense
from tests.gpu.dense import DEVICE, ON_GPU
from tests.gpu.trainer import STEPS, TABLE

pytest.importorskip("transformers")

from interlace.layout import Layout, ParallelSpec
from interlace.model import Checkpointing
from interlace.run import parallelize
from tests.tiny import random_microbatches, tiny_mllm

pytestmark = pytest.mark.skipif(DEVICE is None, reason=dense.WHY_SKIPPED)
HERE = "cpu" if DEVICE is None or DEVICE.type == "cpu" else "cuda"  # run.device
CLOSE = 1e-3  # fp32 on a GPU sums in another order than a CPU


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Convolutions without TF32. Restores torch's settings, which runs may change."""
    allowed, deterministic = torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------- steps


def oracle(microbatches: list[list[Any]], **model: Any) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Loss and gradients of the tiny model in one process, on the CPU."""
    mllm = tiny_mllm(**model)
    loss = mllm(**mllm.collate([sample for group in microbatches for sample in group])).loss
    assert loss is not None
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in mllm.named_parameters()}


def agrees(parallel: Any, microbatches: list[list[Any]], loss: float, gradients: dict[str, Any]) -> None:
    """A step gives this loss and these gradients."""
    result = parallel.step(microbatches)
    assert abs(result.loss - loss) <= CLOSE * abs(loss)
    for name, parameter in parallel.named_parameters():
        expected = gradients[name]
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None and parameter.grad.device == parameter.device, name
        error = (parameter.grad.cpu() - expected).norm()
        assert error <= CLOSE * expected.norm() + 1e-6, (name, error, expected.norm())


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["all", "no_image"])
@pytest.mark.parametrize(
    ("placement", "ranks"), [("parallel", 3), ("colocated", 2), ("replicated", 2), ("colocated", 1)]
)
def test_ranks_of_one_process_equal_one_process(
    placement: str, ranks: int, kind: str, checkpointing: Checkpointing
) -> None:
    assert DEVICE is not None
    pp = {"vision": 1, "audio": 1, "language_model": ranks if placement == "replicated" else 1}
    mllm = tiny_mllm(layers=3)
    microbatches = random_microbatches(mllm, kind)
    loss, gradients = oracle(microbatches, layers=3)
    layout = Layout.from_specs(mllm, {n: ParallelSpec(pp=p) for n, p in pp.items()}, placement=placement, ranks=ranks)
    parallel = parallelize(mllm.to(DEVICE), layout, transport="local", checkpointing=checkpointing)
    agrees(parallel, microbatches, loss, gradients)
    timeline = parallel.timeline()
    assert 0.0 < timeline.makespan < 300.0
    for starts, ends in zip(timeline.start, timeline.finish, strict=True):
        assert all(start <= end for start, end in zip(starts, ends, strict=True)) and starts == sorted(starts)
    assert parallel.evaluate(microbatches).loss == pytest.approx(loss, rel=CLOSE)


def test_replicas_of_one_process_equal_one_process() -> None:
    assert DEVICE is not None
    mllm = tiny_mllm(tied=True).to(DEVICE)
    specs = {"vision": ParallelSpec(dp=2), "audio": ParallelSpec(), "language_model": ParallelSpec(pp=2, dp=2)}
    microbatches = random_microbatches(mllm, "all")
    loss, gradients = oracle(microbatches, tied=True)
    layout = Layout.from_specs(mllm, specs, placement="parallel")
    agrees(parallelize(mllm, layout, transport="local"), microbatches, loss, gradients)


def over_processes(rank: int, kind: str) -> int:
    """One rank of two, each on its own GPU; returns how many parameters it holds."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    torch.backends.cudnn.allow_tf32 = False
    held = 0
    for placement, degrees in (("parallel", {}), ("colocated", {"vision": 2, "audio": 2, "language_model": 2})):
        encoders = ("vision", "audio") if degrees else ("vision",)
        mllm = tiny_mllm(encoders=encoders)
        microbatches = random_microbatches(mllm, "no_image")
        loss, gradients = oracle(microbatches, encoders=encoders)
        specs = {name: ParallelSpec(dp=degrees.get(name, 1)) for name in mllm.modules_order()}
        layout = Layout.from_specs(mllm, specs, placement=placement, ranks=1 if degrees else 2)
        parallel = parallelize(mllm.to(device), layout, transport="distributed", timeout=60.0)
        agrees(parallel, microbatches, loss, gradients)
        whole = parallel.full_gradients()
        assert {name for name, each in whole.items() if each is not None} == {
            name for name, each in gradients.items() if each is not None
        }
        norm = sum(float(each.double().square().sum()) for each in gradients.values() if each is not None) ** 0.5
        assert parallel.clip_grad_norm_(1e9) == pytest.approx(norm, rel=CLOSE)
        assert parallel.timeline().makespan > 0.0
        held += len(list(parallel.named_parameters()))
    return held


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
def test_processes_with_a_gpu_each_equal_one_process() -> None:
    assert DEVICE is not None
    for kind, value in run_ranks(2, over_processes, DEVICE.type, timeout=300):
        assert kind == "returned" and value > 0, value


def on_one_device(rank: int, kind: str) -> set[str]:
    """One rank of a pipeline of two on one device; returns the paths of its edges."""
    if kind == "cpu":
        os.environ["INTERLACE_TRANSPORT"] = "shm"  # on a shared GPU the transport is chosen automatically
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    torch.backends.cudnn.allow_tf32 = False
    taken: set[str] = set()
    for placement, stages, schedule in (("parallel", 1, "1f1b"), ("colocated", 2, "1f1b"), ("colocated", 2, "zb_h1")):
        mllm = tiny_mllm(layers=2, encoders=("vision",))
        microbatches = random_microbatches(mllm, "no_image", count=4)
        loss, gradients = oracle(microbatches, layers=2, encoders=("vision",))
        specs = {name: ParallelSpec(pp=stages) for name in mllm.modules_order()}
        layout = Layout.from_specs(mllm, specs, placement=placement, ranks=2)
        parallel = parallelize(mllm.to(device), layout, schedule=schedule, transport="distributed", timeout=120.0)
        for _ in range(2):
            agrees(parallel, microbatches, loss, gradients)
            parallel.zero_grad()
        assert parallel.channel is not None
        taken |= parallel.channel.paths["pipeline edge"]
        parallel.channel.exchange(rank, "the end of a pipeline")
        parallel.channel.close()
    return taken


def test_two_stages_on_one_device_equal_one_process() -> None:
    assert DEVICE is not None
    if ON_GPU and (why := capabilities()["cuda_ipc"].missing):
        pytest.skip(why)
    path = {"cuda": "cuda_ipc copy engines", "cpu": "shm"}.get(DEVICE.type, "gloo")
    assert run_ranks(2, on_one_device, DEVICE.type, timeout=300) == [("returned", {path})] * 2


# ---------------------------------------------------------------------- whole runs


def run(folder: Path, device: str, *overrides: str, **how: Any) -> tuple[list[dict[str, float]], Path]:
    """A run of the tiny config in this process; its metrics, and its folder."""
    for needed in ("pydantic", "sklearn", "rich", "matplotlib"):
        pytest.importorskip(needed)
    from interlace.train import rank
    from interlace.train.config import load as config
    from interlace.train.report.metrics import read_metrics

    table = copy.deepcopy(TABLE)
    table["run"] |= {"folder": str(folder), "device": device}
    assert rank.run(config.from_table(table, list(overrides)), source="tiny.toml", start=rank.Start(**how)) == 0
    newest = (folder / "tiny" / "latest").resolve()
    return read_metrics(newest), newest


def test_one_gpu_alone_trains_as_a_cpu_does(tmp_path: Path) -> None:
    assert DEVICE is not None
    name = "loss_metrics/global_avg_loss"
    here, folder = run(tmp_path / "here", HERE)
    there, _ = run(tmp_path / "there", "cpu")
    losses, expected = ([line[name] for line in lines] for lines in (here, there))
    assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0], losses
    # Rounding errors accumulate over steps: only the first ones are compared directly.
    assert losses[:5] == pytest.approx(expected[:5], rel=CLOSE) and losses == pytest.approx(expected, rel=0.05)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and (folder / "trace.json").exists() and (folder / "report.html").exists()
    if ON_GPU:
        assert 0.0 < here[-1]["memory/max_active(GiB)"] < 4.0


@pytest.mark.parametrize("first", ["here", "cpu"])
def test_a_checkpoint_goes_on_on_another_device(tmp_path: Path, first: str) -> None:
    assert DEVICE is not None
    name = "loss_metrics/global_avg_loss"
    devices = [HERE, "cpu"] if first == "here" else ["cpu", HERE]
    plan = f"train.schedule_steps={STEPS}"
    whole, _ = run(tmp_path / "whole", devices[0])
    _, folder = run(tmp_path / "parts", devices[0], "train.steps=4", plan)
    lines, _ = run(tmp_path / "parts", devices[1], "train.steps=8", plan, resume=str(folder))
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line[name] for line in lines] == pytest.approx([line[name] for line in whole[:8]], rel=5 * CLOSE)


def test_generators_of_the_device_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Dropout draws from the device's generator: an interrupted run repeats the uninterrupted one bit for bit."""
    assert DEVICE is not None
    pytest.importorskip("pydantic")
    pytest.importorskip("rich")
    from interlace.train.observers.base import Outputs
    from interlace.train.report.metrics import read_metrics
    from interlace.train.trainer import Trainer
    from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed

    class There(ToyModel):
        def loss_sum(self, sample: Any) -> torch.Tensor:
            where = next(self.parameters()).device
            return super().loss_sum(
                SimpleNamespace(input_ids=sample.input_ids.to(where), labels=sample.labels.to(where))
            )

    def trainer(folder: Path, seed: int, stop: int = 0) -> Any:
        folder.mkdir(exist_ok=True)
        config, model = toy_config(), There().to(DEVICE)
        torch.manual_seed(seed)
        made = Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(folder, quiet=True))
        made.membership.stop = lambda: int(0 < stop <= made.step)
        return made

    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer(tmp_path / "whole", 0).run()
    trainer(tmp_path / "parts", 0, stop=7).run()
    later = trainer(tmp_path / "parts", 99)
    later.resume()
    later.run()
    curves = [
        [(line["step"], line["loss_metrics/global_avg_loss"]) for line in read_metrics(tmp_path / part)]
        for part in ("whole", "parts")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 12
