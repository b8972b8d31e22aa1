"""Forecast of a step's time beside the measured one: ``log.predict``.

Before the first step each kind of layer, the optimizer and the links between the ranks are timed, in a few seconds. The
costs are written to costs.json in the run folder; `interlace plan` and `interlace simulate` read them with ``--costs``.
Rank 0 then predicts each logged step. The other ranks time layers too, and discard the result: as in a step, all ranks
then compute at the same time and share memory bandwidth.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from interlace._files import write_whole
from interlace.balance import AllToAllPlan
from interlace.costs.fitted import FREE
from interlace.costs.links import Links
from interlace.costs.step import FittedCosts, costs_text, read_costs
from interlace.plan import LinkModel, fit_link
from interlace.simulate import Timeline
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.device import AUTOCAST, finish
from interlace.train.launch import launcher
from interlace.train.models.tuning import Rates, rates
from interlace.train.optim import Optimizer
from interlace.train.step_overhead import measure_overhead

if TYPE_CHECKING:
    from interlace.data import SampleDataset
    from interlace.model import MultimodalModel, Sample, SampleOutline
    from interlace.run.parallel_model import ParallelModel

NAME = "costs.json"
SECONDS = 4.0  # time budget for layers
MOST_BYTES = 256 << 20  # of weights used to time the optimizer
_TURNS = 4


def measure(config: Config, model: MultimodalModel, data: SampleDataset, device: torch.device) -> FittedCosts:
    """Costs of a config's model on this rank's device. data: the training set."""
    from interlace.estimate.profiling import ProfileOptions, profile_costs

    largest = chunk_samples(config, data)
    samples = [data.sample(i, 0) for i in range(min(len(data), max(largest, 8)))]
    options = ProfileOptions(
        largest=largest,
        tps={name: (config.parallel.module(name).tp,) for name in config.modules()},
        device=device,
        autocast=AUTOCAST[config.train.precision],
        sequence_parallel=config.parallel.sequence_parallel,
    )
    optimizer = time_optimizer(config, model, device)
    costs = profile_costs(model, samples, options, budget=SECONDS, optimizer=optimizer)
    around = measure_overhead(config, model, data, device.type)
    return replace(costs, host_overhead=around(launcher.local_ranks(config.world_size()), torch.get_num_threads()))


def chunk_samples(config: Config, data: SampleDataset) -> int:
    """Samples of the largest chunk of the language model; for packed rows the samples that fill one."""
    if not config.data.pack or config.data.max_tokens is None:
        return -(-config.train.batch_size // config.parallel.replicas("language_model") // config.train.microbatches)
    tokens = count = 0
    while count < len(data) and tokens < config.data.max_tokens:
        tokens += sum(map(sum, data.lengths(count).values()))
        count += 1
    return max(count, 1)


def time_optimizer(config: Config, model: nn.Module, device: torch.device) -> LinkModel:
    """Time of the optimizer's step as a linear function of bytes of weights, fitted to all trained weights and to half.

    Tensors have the model's own shapes and groups, so one call updates as many of them as in training. Above
    `MOST_BYTES` in all, some are left out.
    """
    rate = rates(config, model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if name in rate]
    random.Random(0).shuffle(trained)  # so that one half represents the whole
    chosen: list[tuple[str, nn.Parameter]] = []
    total = 0
    for name, parameter in trained:
        if not chosen or total + parameter.nbytes <= MOST_BYTES:
            chosen.append((name, parameter))
            total += parameter.nbytes
    sizes, seconds = [], []
    for some in (chosen[: len(chosen) // 2], chosen):
        if some:
            sizes.append(sum(parameter.nbytes for _, parameter in some))
            seconds.append(_update_seconds(config, some, rate, device))
    return fit_link(sizes, seconds) if sizes else FREE


def _update_seconds(
    config: Config, parameters: Sequence[tuple[str, nn.Parameter]], rate: Mapping[str, Rates], device: torch.device
) -> float:
    """Minimum time of several updates of random weights with these shapes. The first update is a warm-up.

    Each update includes the gradient norm and clipping, as in a training step.
    """
    from interlace.run.execute.gradients import squares, totals

    mine = [(name, nn.Parameter(torch.zeros_like(each, device=device))) for name, each in parameters]
    optimizer, took = Optimizer(mine, config, rate), []
    for turn in range(_TURNS):
        for _, weight in mine:
            weight.grad = torch.ones_like(weight)
        finish()
        begin = time.perf_counter()
        totals(squares([weight.grad for _, weight in mine if weight.grad is not None]))
        torch._foreach_mul_([weight.grad for _, weight in mine if weight.grad is not None], 0.5)
        optimizer.step(turn + 1)
        finish()
        took.append(time.perf_counter() - begin)
    return max(min(took[1:]), 1e-9)


def save(folder: Path, costs: FittedCosts, links: Links) -> None:
    """Writes costs.json of a run."""
    write_whole(folder / NAME, costs_text(costs, links=links.to_table()))


def load(path: Path) -> tuple[FittedCosts, Links]:
    """Costs and links from a file that a run wrote. Raises ConfigError for another file."""
    try:
        costs, table = read_costs(path)
        return costs, Links.from_table(table.get("links", {}))
    except ValueError as error:
        why = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(f"--costs: {why}; a run with log.predict = true writes such a file") from None


class Forecast:
    """Predictions of a run's logged steps, on rank 0. parallel: the run's model, which supplies the lists."""

    def __init__(self, config: Config, parallel: ParallelModel, costs: FittedCosts, links: Links) -> None:
        from interlace.estimate.predictor import Predictor

        self._parallel = parallel
        self._predictor = Predictor(
            parallel.mllm,
            costs,
            links,
            recompute=config.train.recompute,
            sequence_parallel=config.parallel.sequence_parallel,
            autocast=AUTOCAST[config.train.precision],
        )
        self._rows: list[tuple[float, ...]] = []
        self._failed = False

    def add(
        self,
        samples: Sequence[Sample | SampleOutline],
        measured: Timeline,
        seconds: float,
        exchange: AllToAllPlan | None = None,
    ) -> dict[str, float]:
        """Predicts a step and returns the metrics. `measured`: timeline of its lists; `seconds`: its time without
        waiting for data.

        exchange: for streams, the bytes exchanged for this step. The exchange during the step carries the next batch,
        which has not been read when the step begins. The prediction assumes the same sizes between the same ranks.
        Predicted lists are compared with measured lists. The step also includes the optimizer and more: see
        docs/costs.md. A failed prediction is reported once and does not end the run.
        """
        if self._failed or measured.table is None:
            return {}
        try:
            lists_of = self._parallel.schedule(measured.table, dispatch=exchange is not None)
            schedule = replace(lists_of, table=measured.table)
            items = None if exchange is None else exchange.between
            prediction = self._predictor.predict(schedule, samples, items=items)
            lists = self._predictor.predict(schedule, samples, items=items, optimizer=False)
        except Exception as error:
            self._failed = True
            print(f"interlace: no steps are predicted from here on: {error}", file=sys.stderr, flush=True)
            return {}
        bubble = 100.0 * max(lists.bubble, 0.0)  # rounding can give a negative bubble for one rank without gaps
        self._rows.append(
            (lists.makespan, measured.makespan, prediction.makespan, seconds, bubble, 100.0 * measured.bubble)
        )
        return {
            "time_metrics/predicted_lists(s)": lists.makespan,
            "time_metrics/lists(s)": measured.makespan,
            "time_metrics/predicted_step(s)": prediction.makespan,
            "predicted_bubble(%)": bubble,
        }

    def rows(self) -> dict[str, float]:
        """Rows of the summary: medians over the logged steps."""
        if not self._rows:
            return {}
        parts = ("lists_seconds", "step_seconds", "bubble_percent")
        names = (f"{how}_{part}" for part in parts for how in ("predicted", "measured"))
        return dict(zip(names, map(statistics.median, zip(*self._rows, strict=True)), strict=True))
