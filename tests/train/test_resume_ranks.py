"""Exact resumption over two processes. Dropout on both ranks makes their generators part of the state."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from interlace.data import ReadAhead
from interlace.run import parallelize
from interlace.train.config.load import from_table
from interlace.train.data.feed import Feed, datasets
from interlace.train.models.build import build, build_layout, initialize
from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import read_metrics
from interlace.train.trainer import Trainer
from tests.distributed.workers import run_ranks
from tests.train.resume_ranks import TABLE

WINDOW = ("loss_metrics", "lr", "grad_norm", "step")


def curves(rank: int, folder: str) -> tuple[list[dict[str, float]], list[dict[str, float]], bool]:
    """The metrics of an uninterrupted and of a resumed run, and whether this rank's final weights are equal."""
    from interlace.data import ByteTokenizer

    config, tokenizer = from_table(copy.deepcopy(TABLE)), ByteTokenizer()
    ends = []
    for name, stops in (("whole", [None]), ("parts", [2, 5, None])):
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        for part, stop in enumerate(stops):
            model = build(config, tokenizer)
            layout = build_layout(config, model)
            for module in model.modules():  # neither family has dropout of its own outside attention
                if type(module).__name__.endswith("MLP"):
                    module.register_forward_hook(lambda m, _, out: torch.nn.functional.dropout(out, 0.2, m.training))
            torch.manual_seed(100 * part + rank)  # a new process does not have the run's state
            parallel = parallelize(model, layout, transport="distributed", timeout=30)
            initialize(parallel, seed=0)
            train, held_out = datasets(config, model, tokenizer)
            wanted = partial(parallel.wanted, microbatches=2, chunks={})
            feed = Feed(train, held_out, batch_size=8, seed=0, validation_samples=8, ahead=ReadAhead(wanted=wanted))
            trainer = Trainer(config, model, parallel, feed, Outputs(place, quiet=True))
            if stop is not None:
                trainer.membership.stop = lambda trainer=trainer, stop=stop: trainer.step >= stop  # type: ignore[misc]
            if part:
                trainer.resume()
            trainer.run()
            feed.close()
        ends.append({key: parameter.detach().clone() for key, parameter in trainer.parameters.items()})
    same = all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    whole, parts = (
        [{k: v for k, v in line.items() if k.startswith(WINDOW)} for line in read_metrics(Path(folder) / name)]
        if rank == 0
        else []
        for name in ("whole", "parts")
    )
    return whole, parts, same


@pytest.mark.slow
def test_two_ranks_with_dropout_resume_bit_for_bit(tmp_path: Path) -> None:
    results = run_ranks(2, curves, str(tmp_path), timeout=240)
    for kind, value in results:
        assert kind == "returned", value
    whole, parts, _ = results[0][1]
    assert len(whole) == 6 and parts == whole
    assert all(same for _, (_, _, same) in results)
    assert whole[0]["loss_metrics/step_loss"] != pytest.approx(whole[1]["loss_metrics/step_loss"])
