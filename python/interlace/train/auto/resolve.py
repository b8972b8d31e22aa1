"""Resolution of ``parallel.layout = "auto"`` to a fixed config: from a layout file, or by a new choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from interlace._files import write_whole
from interlace._text import one_line
from interlace.costs.links import Links
from interlace.train import device as devices
from interlace.train.auto import layout_file, report
from interlace.train.auto.choose import WORTH, Decision, batch_size_of, decide
from interlace.train.auto.machine import ASSUMED, STATED, Machine, counted, here, most_ranks
from interlace.train.auto.work import Work, has_data, nominal_work, pool, real_work
from interlace.train.config.load import ConfigError, read_text
from interlace.train.config.sections import Config
from interlace.train.data.texts import vocabulary_of
from interlace.train.launch import launcher
from interlace.train.models.build import build, build_layout
from interlace.train.models.costs import stated_links
from interlace.train.models.media_specs import check_inputs
from interlace.train.models.tuning import check_degrees
from interlace.train.step_overhead import measure_overhead

if TYPE_CHECKING:
    from interlace.data import SampleDataset
    from interlace.model import MultimodalModel, Sample

PICTURE = "layout.png"


def resolve_config(
    config: Config, *, source: str, folder: Path, given: Path | None, say: Callable[[str], None]
) -> Config:
    """The settled config of a run in `folder`. Writes layout.toml there, and a picture of the runners-up for a new
    choice.

    given: a layout file to repeat; by default the folder's own, if it has one. Raises ConfigError for a file of another
    config, and if nothing fits.
    """
    given, own = given or layout_file.of_run(folder), folder / layout_file.NAME
    if given is not None:
        resolved = config_of_layout(config, given, source=source)
        write_whole(own, read_text(given, "layout"))
        say(f"layout of {given}: {_summary(resolved)}")
        return resolved
    text, decision = choose(config, source=source, say=say)
    write_whole(own, text)
    report.draw(decision, folder / PICTURE, f"{config.run.name}: candidates of parallel.layout = 'auto'")
    return layout_file.with_layout(config, text, str(own))


def config_of_layout(config: Config, given: Path, *, source: str) -> Config:
    """The config with the layout of the file `given`. Raises ConfigError as `layout_file.with_layout` does, for a file
    that cannot be read, and for a config that has its own layout."""
    if not config.parallel.auto:
        raise ConfigError(f"--layout {given}: {source} fixes its own layout; omit --layout")
    return layout_file.with_layout(config, read_text(given, "layout"), str(given))


def check_fits(config: Config, given: Path) -> None:
    """Raises ConfigError, naming the layout file `given`, if its layout cannot cut the model."""
    model = build(config, vocabulary_of(config, source=str(given)), source=str(given))
    check_degrees(config, model, source=str(given))
    build_layout(config, model, source=str(given))


def choose(
    config: Config, *, source: str, say: Callable[[str], None], ranks: int | None = None
) -> tuple[str, Decision]:
    """Measures this machine and chooses: the text of a layout.toml, and the decision."""
    kind = devices.choose(config.run.device, 1, source=source)
    worlds = [ranks] if ranks is not None else worlds_up_to(most_ranks(config, kind))
    model, data = _model_and_data(config, source)
    samples = pool(data)
    timed = config.train.batch_size if "batch_size" not in (config.parallel.choose or ()) else 16
    links, links_origin = _links(config, kind, worlds, source)
    overhead = measure_overhead(config, model, data, kind)
    try:
        machine = here(
            config,
            model,
            samples[: max(1, min(len(samples), timed))],  # as many as a chunk could have
            kind=kind,
            worlds=worlds,
            links=links,
            how=links_origin,
            worth=WORTH,
            say=lambda line: say(f"auto: {line}"),
            around=overhead,
        )
    except Exception as error:  # from any model's own code, called on a single layer
        why = one_line(error, 300)
        raise ConfigError(
            f"{source}: [parallel] layout = 'auto' times each layer by itself, but this model's layers cannot be "
            f"timed: {why}. Write the layout into [parallel] instead of layout = 'auto', or count FLOPs instead "
            "of timing: interlace plan choose CONFIG --gpus N --memory GB --out layout.toml (on CPUs too: N ranks of "
            "GB each), then interlace train CONFIG --layout layout.toml"
        ) from error
    worlds = [each for each in worlds if machine.worlds is None or each in machine.worlds]
    return _decided(config, model, machine, worlds, source, say, samples, partial(real_work, config, data))


def _model_and_data(config: Config, source: str) -> tuple[MultimodalModel, SampleDataset]:
    from interlace.train.data.feed import datasets, indexed
    from interlace.train.data.texts import tokenizer_of

    tokenizer = tokenizer_of(config, source=source)
    model = build(config, tokenizer, source=source)
    return model, indexed(*datasets(config, model, tokenizer, source=source))


def _links(config: Config, kind: str, worlds: list[int], source: str) -> tuple[Links, str]:
    """Links between ranks, and their source. Raises ConfigError for unknown networks."""
    from interlace.estimate.thread_links import gloo_links

    stated = stated_links(config)
    if stated is not None:
        return stated, STATED
    if kind != "cpu":
        return ASSUMED, "links assumed: 200 GB/s between the GPUs of a host, 40 GB/s per GPU between hosts"
    if launcher.local_ranks(max(worlds)) < max(worlds):
        raise ConfigError(
            f"{source}: [parallel] layout = 'auto' does not measure the network between hosts, but these ranks are on "
            "several hosts: set its speed with parallel.links (host, network and ranks_per_host), or write the layout "
            "into [parallel]"
        )
    return gloo_links(), "gloo timed between two threads"


def choose_for(
    config: Config, *, gpus: int, memory: float, tflops: float, how: str, source: str, say: Callable[[str], None]
) -> tuple[str, Decision, Machine]:
    """Chooses for `gpus` GPUs of `memory` bytes that are not here; layer costs are counted FLOPs.

    Lengths come from the config's data if its files are here, else from samples that fill its budgets.
    """
    if has_data(config):
        model, data = _model_and_data(config, source)
        samples, work = pool(data), partial(real_work, config, data)
    else:
        model = build(config, vocabulary_of(config, source=source), source=source)
        check_inputs(config, model, source=source)
        samples, work = nominal_work(config, model, 1).samples(), partial(nominal_work, config, model)
    machine = counted(config, model, tflops=tflops, memory=memory, how=how)
    text, decision = _decided(config, model, machine, [gpus], source, say, samples, work)
    return text, decision, machine


def _decided(
    config: Config,
    model: MultimodalModel,
    machine: Machine,
    worlds: list[int],
    source: str,
    say: Callable[[str], None],
    samples: list[Sample],
    work_of: Callable[[int], Work],
) -> tuple[str, Decision]:
    size, note = batch_size_of(config, model, samples, machine, max(worlds))
    train = config.train.model_copy(update={"batch_size": size})
    sized = config.model_copy(update={"train": train})
    work = work_of(size)
    decision = decide(sized, model, work, machine, worlds, source=source, notes=[*[note] * bool(note), *machine.notes])
    for line in report.lines(decision, machine.origin, work.origin):
        say(f"auto: {line}")
    return layout_file.text_of(config, decision, machine.origin, work.origin), decision


def worlds_up_to(most: int) -> list[int]:
    """Numbers of ranks to compare: all up to 4, then powers of two, and the maximum."""
    return sorted({each for each in range(1, most + 1) if each <= 4 or each & (each - 1) == 0} | {most})


def _summary(config: Config) -> str:
    degrees = "; ".join(f"{name}: {config.parallel.degrees(name)}" for name in config.modules())
    world = config.world_size()
    return f"{world} rank{'s' * (world > 1)}, placement {config.parallel.placed}, {degrees}"
