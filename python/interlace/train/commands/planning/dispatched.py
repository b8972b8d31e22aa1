"""``interlace plan show --data``: load balance over the replicas of each module in the first step of a run.

Loads are shown before and after `train.balance`. Only lengths are read; no media are decoded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train.blame import check_picture, writing
from interlace.train.commands.planning.costs import Priced
from interlace.train.config.load import ConfigError

if TYPE_CHECKING:
    import numpy as np


def show(priced: Priced, path: Path) -> list[str]:
    """Draws the loads of the first step's replicas; returns a line for each module. Raises ConfigError."""
    from interlace.run.tables.batch import GlobalBatch
    from interlace.run.tables.table import Lengths
    from interlace.simulate import plot_loads
    from interlace.train.data.feed import Feed, datasets
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build_layout
    from interlace.train.scheduling import samples_to_ranks

    config, model, source = priced.config, priced.model, priced.source
    check_picture("--data", path)
    if config.data.reading == "stream":
        raise ConfigError(
            f"{source}: --data reads the lengths of the run's first step, which of a stream nobody knows before it: "
            "name a config that reads at random"
        )
    tokenizer = tokenizer_of(config, source=source)
    layout = build_layout(config, model, source=source)
    assigner, dispatcher = samples_to_ranks(config, layout, model)
    if dispatcher is None:
        raise ConfigError(f"{source}: --data compares replicas, but every module has one: set parallel.dp")
    feed = Feed.of_config(config, *datasets(config, model, tokenizer, source=source), lambda _: [])
    try:
        given = feed.next().given
    finally:
        feed.close()
    batch = GlobalBatch.of(given, None if config.data.pack else config.train.microbatches, config.chunks())
    table = batch.table(layout, assigner, dispatcher)
    lengths = Lengths.of(batch.samples, list(layout.modules)[:-1])
    before, after = dispatcher.as_drawn(lengths), dispatcher.computed(table, lengths)
    panels: dict[str, np.ndarray] = {}
    lines = []
    for name in layout.modules:
        if not before[name].sum():
            lines.append(f"{name}: no sample of the first step has any")
            continue
        both = before[name] / before[name].mean(), after[name] / after[name].mean()
        panels[f"{name}, as drawn"], panels[f"{name}, balanced"] = both
        lines.append(
            f"{name}: the costliest of {len(both[0])} replicas computes {both[0].max():.2f} times the mean as drawn, "
            f"{both[1].max():.2f} times with train.balance = {config.train.balance!r}"
        )
    with writing("--data", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"{config.run.name}, first step: what replicas compute, train.balance = {config.train.balance!r}"
        plot_loads(panels, path, title=title, unit="of the mean", item="replica")
    return [*lines, f"wrote {path}"]
