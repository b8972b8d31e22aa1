"""``interlace plan choose``: a layout for GPUs that need not be here, with reasons; writes layout.toml."""

from __future__ import annotations

import argparse

from interlace.train.blame import writing
from interlace.train.commands.planning.costs import speed_of
from interlace.train.commands.planning.layout import counted_noun
from interlace.train.config.load import ConfigError, load


def choose(options: argparse.Namespace) -> int:
    """Chooses a layout. Prints it with the reasons, or the content of layout.toml with ``--json``."""
    import json

    from interlace._files import write_whole
    from interlace.train.auto import layout_file, report
    from interlace.train.auto.resolve import choose_for

    source = str(options.config)
    if options.gpus < 1 or not 0 < options.memory < 1e6:
        raise ConfigError(f"--gpus {options.gpus} --memory {options.memory:g}: at least 1 GPU, and more than 0 GB")
    speed = speed_of(options)
    config = load(options.config, options.set, auto=True)
    how = "as given" if options.tflops is not None else "measured here with a matrix product; give --tflops"
    lines: list[str] = []
    text, decision, _ = choose_for(
        config, gpus=options.gpus, memory=1e9 * options.memory, tflops=speed, how=how, source=source, say=lines.append
    )
    if options.out is not None:
        with writing("--out", options.out):
            write_whole(options.out, text)
    if options.picture is not None:
        report.draw(decision, options.picture, f"{config.run.name}: {counted_noun(options.gpus, 'GPU')}")
    if options.json:
        print(json.dumps(layout_file.table_of(text), indent=1, sort_keys=True, allow_nan=False))
        return 0
    for line in lines:
        print(line)
    for path in filter(None, (options.picture, options.out)):
        print(f"wrote {path}")
    print(layout_file.section_of(text))
    return 0
