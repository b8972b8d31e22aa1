"""Command line: ``interlace train | coordinator | generate | export | doctor | data | mask | plan | simulate``.

The module of a command is imported when the command runs, so that ``--help`` and a wrong option answer at once. An
error that the user can correct (command line, config, files, ranks) is one line and exit code 2. A failed run is one
line and exit code 1. A bug in the program keeps its traceback. ``--debug`` shows the traceback of all errors.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import interlace
from interlace.train.config.local_paths import local_path

CHECKPOINT = "run folder (its best checkpoint if it has one, else its newest) or one checkpoint folder"
DESCRIPTION = "Train multimodal language models with bitfield attention and a scheduled pipeline."
SUBCOMMANDS = {"doctor": ("machine", "cluster", "crash"), "plan": ("show", "choose"), "simulate": ("step", "failures")}
"""Subcommands that may be left out: the first is the default."""

USER_ERRORS = ["train.config.load.ConfigError", "train.checkpoint.storage.CheckpointError"]
USER_ERRORS += ["modalities.errors.DecodeError"]
FAILURES = ["train.errors.TrainingError", "run.errors.PipelineError", "comm.process.errors.CommError"]
FAILURES += ["resilience.errors.ResilienceError"]
"""Classes of errors, below `interlace`. Each is printed in one line, without a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    top = parser()
    options, unknown = top.parse_known_args(with_default(sys.argv[1:] if arguments is None else arguments))
    if unknown:
        top.exit(2, f"interlace: unknown arguments: {' '.join(unknown)} (see {options.prog} --help)\n")
    from interlace.train.launch import launcher

    try:
        if options.command is None:
            top.print_help()
            code = 0
        else:
            _check_cache()
            code = _run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interlace: interrupted", file=sys.stderr)
        return 130
    except SystemExit as leaving:  # rich raises it for a broken pipe
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        launcher.mute()  # the reader of stdout closed it early (``| head``): success
        return 0
    except BrokenPipeError:
        if options.command == "train":  # training never ends because stdout was closed
            raise
        launcher.mute()
        return 0
    except Exception as error:
        user_error, known = _kind_of(error)
        if launcher.under_launcher():
            launcher.report_error(error, user_error=user_error and not options.debug, known=known and not options.debug)
        elif options.debug or not known:
            raise
        else:
            print(f"interlace: {error}", file=sys.stderr)
        return launcher.USER_ERROR if user_error else 1


def with_default(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the default subcommand if a command has subcommands and none is given."""
    names = SUBCOMMANDS.get(words[0]) if words else None
    if names is None or (len(words) > 1 and words[1] in (*names, "-h", "--help")):
        return list(words)
    return [words[0], names[0], *words[1:]]


def _run(options: argparse.Namespace) -> int:
    """Imports the module of the command, and runs its function."""
    if options.command == "simulate":  # makes few cycles; gc takes 1 s of 10 s for a cluster
        gc.disable()
    try:
        module, function = options.function.split(":")
        run = getattr(importlib.import_module(f"interlace.train.commands.{module}"), function)
        return int(run(options))
    finally:
        gc.enable()


# ---------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line, without the usage.

    complete: adds the options that need imports, once the command is chosen.
    """

    complete: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in ArgumentParser."""
        complete, self.complete = self.complete, None
        if complete is not None:
            complete(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"interlace: {message} (see {self.prog} --help)\n")


class _Moved(argparse.Action):
    """An option of earlier versions: refused with the new spelling, which is `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.exit(2, f"interlace: {self.option_strings[0]} is now: {self.const}\n")


def _moved(command: argparse.ArgumentParser, new: str, *options: str) -> None:
    for option in options:
        command.add_argument(option, action=_Moved, nargs="?", const=new, help=argparse.SUPPRESS)


class _Commands:
    """Adds commands, or subcommands of one command, to a parser."""

    def __init__(self, parent: argparse.ArgumentParser, *, dest: str) -> None:
        self._added = parent.add_subparsers(dest=dest, metavar=dest, required=dest != "command", parser_class=_Parser)

    def group(self, name: str, summary: str, description: str) -> _Commands:
        """Adds a command that has subcommands."""
        return _Commands(self._added.add_parser(name, help=summary, description=description), dest="action")

    def add(self, name: str, run: str, summary: str, more: str = "", *, config: bool = False) -> _Parser:
        """Adds a command.

        run: "module:function" below `interlace.train.commands`. summary: its line in the list of commands, and the
        first sentence of its help; more: the other sentences. config: the command takes a config and ``--set``.
        """
        sentence = summary[0].upper() + summary[1:]
        command = self._added.add_parser(name, help=summary, description=f"{sentence}. {more}".strip())
        command.set_defaults(function=run, prog=command.prog)
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        if config:
            command.add_argument("config", type=_path, help="TOML file, such as configs/stamps.toml")
            _add_set(command)
        return command


def parser() -> argparse.ArgumentParser:
    """The argument parser with all commands."""
    top = _Parser(prog="interlace", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"interlace {interlace.__version__}")
    top.set_defaults(debug=False, prog=top.prog)
    commands = _Commands(top, dest="command")
    parts = (_add_train, _add_coordinator, _add_generate, _add_export, _add_doctor)
    for add in (*parts, _add_data, _add_mask, _add_plan, _add_simulate):
        add(commands)
    return top


def _add_train(commands: _Commands) -> None:
    train = commands.add(
        "train",
        "train:train",
        "train a config",
        "Starts the ranks of the config, or is one of them under torchrun; run.device says whether they compute on "
        "GPUs or CPUs. Exit code: 0 after the last step, 143 or 130 if SIGTERM or Ctrl-C ended the saved run, 2 for an "
        "error that the user can correct, else 1.",
    )
    train.add_argument("config", type=_path, nargs="?", help="TOML file; with --resume by default that of the run")
    _add_set(train)
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue from a run folder or one of its checkpoints; without RUN from the newest run of the config's "
        "name",
    )
    train.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume: take the run lock from the job that holds it; that job ends with an error",
    )
    train.add_argument(
        "--layout",
        type=_path,
        metavar="FILE",
        help="with parallel = 'auto': use the layout in this layout.toml instead of choosing one",
    )
    _moved(train, "interlace train CONFIG --layout FILE", "--lock")
    train.add_argument(
        "--elastic",
        action="store_true",
        help="run one node of an elastic run, which nodes may join and leave (see [resilience]); without "
        "resilience.coordinator, all nodes on this machine",
    )


def _add_coordinator(commands: _Commands) -> None:
    coordinator = commands.add(
        "coordinator",
        "elastic:coordinate",
        "coordinate the nodes of an elastic run",
        "Start it on a machine that does not train and outlives the nodes. Nodes started by `interlace train CONFIG "
        "--elastic` connect here (resilience.coordinator). When a node is lost, the others continue without it. With "
        "--state the coordinator may be killed and started again with the same command, and nodes wait for it; without "
        "--state its end ends the run. Exit code: 0 if the run has trained to the end, 143 if it was saved because too "
        "many nodes had to leave, 1 if it failed, 2 if the run of --state is over.",
    )
    coordinator.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    coordinator.add_argument("--port", type=int, required=True, help="port for nodes' supervisors; 0: any free one")
    coordinator.add_argument("--store-port", type=int, default=0, help="port for ranks (default: any free port)")
    coordinator.add_argument("--state", type=_path, metavar="FILE", help="state of the run, for a restart")
    coordinator.add_argument("--journal", type=_path, metavar="FILE", help="append events to FILE, as JSON lines")


def _add_generate(commands: _Commands) -> None:
    generate = commands.add(
        "generate",
        "generate:generate",
        "answer from a model: media and text -> text",
        "The model is a run, one of its checkpoints, an exported folder or a whole HuggingFace checkpoint. Media and "
        "texts make a turn, which ends with its --text; each turn is answered in one paragraph on stdout. Several "
        "--text are a conversation: each answer sees all turns before it.",
    )
    generate.add_argument("model", type=_path, help=f"{CHECKPOINT}; or an exported folder")
    generate.complete = _add_media
    _moved(generate, "--text", "--prompt")
    _moved(generate, "--audio", "--speech")
    _add_choice(generate)
    generate.add_argument("--max-new-tokens", type=int, default=96, help="longest answer, in tokens (default: 96)")


def _add_export(commands: _Commands) -> None:
    export = commands.add(
        "export",
        "export:export",
        "write a checkpoint of a run for HuggingFace",
        "A whole HuggingFace checkpoint keeps its keys, tokenizer and processor; a model of modules becomes one "
        "folder per module.",
    )
    export.add_argument("run", type=_path, help=CHECKPOINT)
    export.add_argument("folder", type=_path, help="folder to write: new or empty")
    _add_choice(export)
    export.add_argument("--adapter", action="store_true", help="write only the adapters of a LoRA run, for peft")
    export.add_argument(
        "--check",
        type=int,
        metavar="N",
        help="afterwards answer N held-out questions with HuggingFace's own classes from FOLDER, and compare prompts "
        "and answers with Interlace's, token by token; exit code 1 if they differ",
    )


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.group(
        "doctor",
        "check this machine or a cluster, or analyse a crash",
        "`interlace doctor` alone is `interlace doctor machine`.",
    )
    machine = doctor.add(
        "machine",
        "doctor:machine",
        "show which features this machine supports, and why others are off",
        "Exit code: 0 if training can run here, else 1.",
    )
    _moved(machine, "interlace doctor cluster", "--distributed")
    _moved(machine, "interlace doctor crash RUN", "--crash")
    cluster = doctor.add(
        "cluster",
        "cluster.check:cluster",
        "check that the ranks of a job fit together, before a long run",
        "Compares versions, config, files, devices and clocks of all ranks, and measures the connections between them. "
        "Start it under torchrun; without torchrun it starts the ranks of CONFIG, or --ranks, on this machine. Exit "
        "code: 0 if no problem was found, else 1.",
    )
    cluster.add_argument("config", type=_path, nargs="?", help="TOML file of the run; its bytes are compared")
    _moved(cluster, "interlace doctor cluster CONFIG", "--config")
    cluster.add_argument("--ranks", type=int, help="ranks to start on this machine (default: the config's)")
    cluster.add_argument("--timeout", type=float, default=30.0, help="seconds that a rank may be late (default: 30)")
    cluster.add_argument("--seconds", type=float, default=60.0, help="seconds for measuring pairs (default: 60)")
    cluster.add_argument(
        "--slow",
        type=float,
        default=0.25,
        metavar="FRACTION",
        help="report a pair whose bandwidth is below this fraction of the median (default: 0.25)",
    )
    cluster.add_argument("--json", type=_path, metavar="FILE", help="write the report there, in bytes and seconds")
    crash = doctor.add(
        "crash",
        "crash:crash",
        "find the rank that caused a failed run, and show which rank waited for which",
        "Reads the flight recorders (rank-N.json) that ranks write when a run fails.",
    )
    crash.add_argument("folder", type=_path, metavar="RUN", help="run folder, or a folder of such files")


def _add_data(commands: _Commands) -> None:
    data = commands.group(
        "data",
        "check or index files of chats, or make some",
        "Files of chats are JSON lines, JSON, parquet, or folders of `datasets`: docs/your-own-data.md.",
    )
    check = data.add(
        "check",
        "data:check",
        "report lengths and broken records and files, and draw a page of samples",
        "Reads all records of a config's data, or of files alone, and says which are cut or left out and why. With a "
        "config lengths are in tokens, and samples are shown as its model will see them. Exit code: 0 if all is well, "
        "1 if something is broken, 2 if the files cannot be read at all.",
    )
    check.add_argument("files", type=_path, nargs="+", metavar="CONFIG|FILE", help="a TOML file, or files of chats")
    _add_set(check)
    check.add_argument("--samples", type=int, default=12, help="samples on the page; 0: no page (default: 12)")
    check.add_argument("--out", type=_path, default=Path("data.html"), help="page to write (default: data.html)")
    check.add_argument("--list", action="store_true", help="print records left out or cut, and ignored keys")
    check.add_argument("--headers", action="store_true", help="read only headers of media, decode none: faster")

    index = data.add(
        "index",
        "data:index",
        "index large data once: offsets of records, sizes of records and media",
        "Training and `data check` otherwise make the index on first use. Continues after an interruption; of a file "
        "that has grown only the new part is read. Exit code: 0 if all records can be used, 1 if some are broken, 2 if "
        "the files cannot be read at all.",
    )
    index.add_argument("files", type=_path, nargs="+", metavar="CONFIG|FILE", help="a TOML file, or files of chats")
    _add_set(index)
    index.add_argument("--processes", type=int, metavar="N", help="processes at a time (default: one per core)")
    index.add_argument("--decode", action="store_true", help="of files alone: decode all media once")
    index.add_argument(
        "--sizes",
        choices=["files", "records"],
        default="files",
        help="of files alone: source of media sizes, as data.sizes of a config (default: files)",
    )
    index.add_argument("--media", type=_local, metavar="FOLDER", help="of files alone: base of relative paths of media")
    index.add_argument("--cache", type=_local, metavar="FOLDER", help="of files alone: folder of the index")

    folder = data.add(
        "folder",
        "data:folder",
        "make chats from a folder of images",
        "Writes JSON lines. The answer for NAME.png is the text of NAME.txt beside it or, if no image has such a text, "
        "the name of its sub-folder. All images are decoded once. Exit code: 0 if all are used, 1 if some are left out "
        "(each is named), 2 if there is nothing to write.",
    )
    folder.add_argument("folder", type=_path, metavar="IMAGES", help="images in sub-folders, or with texts beside them")
    folder.add_argument("--out", type=_path, default=Path("chats.jsonl"), help="file to write (default: chats.jsonl)")
    folder.add_argument(
        "--question",
        help="question for each image (default: 'What is it?'; with texts: 'Describe the picture.')",
    )
    folder.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="write this fraction of the images of each answer to NAME.held-out.jsonl; equal images stay together "
        "(default: 0)",
    )

    stamps = data.add(
        "stamps",
        "stamps:stamps",
        "make example chats about images and speech, with a tokenizer",
        "Writes a folder of chats about Debian's Tux Paint stamps: train.jsonl, validation.jsonl, media, tokenizer, "
        "and a README that lists what was left out. The package (157 MB) is fetched with apt on first use and not "
        "installed; without it the folder has scikit-learn's digits in the same form. A folder made earlier with the "
        "same options is kept.",
    )
    stamps.add_argument("folder", type=_path, metavar="FOLDER", help="folder to write: new, or made earlier")
    stamps.add_argument("--records", type=int, metavar="N", help="chats to train on (default: 19200)")
    stamps.add_argument("--seed", type=int, metavar="N", help="seed of all random choices (default: 0)")
    stamps.add_argument("--languages", nargs="+", metavar="CODE", help="such as en fr (default: ten languages)")
    stamps.add_argument("--cache", type=_local, metavar="FOLDER", help="folder of the package, as data.cache")

    digits = data.add(
        "digits",
        "stamps:digits",
        "make example chats about handwritten digits, with a tokenizer",
        "Writes a folder of chats about scikit-learn's digits, in the form of those about stamps. Nothing is fetched. "
        "A folder made earlier with the same options is kept.",
    )
    digits.add_argument("folder", type=_path, metavar="FOLDER", help="folder to write: new, or made earlier")
    digits.add_argument("--records", type=int, metavar="N", help="chats to train on (default: 19200)")
    digits.add_argument("--seed", type=int, metavar="N", help="seed of all random choices (default: 0)")


def _add_mask(commands: _Commands) -> None:
    mask = commands.add(
        "mask",
        "mask:mask",
        "draw the attention mask of a config's first samples",
        "The samples are packed into one row; its length is printed in tokens.",
        config=True,
    )
    mask.add_argument("--samples", type=int, default=4, help="samples packed into the row (default: 4)")
    mask.add_argument("--out", type=_path, default=Path("mask.png"), help="picture to write (default: mask.png)")


def _add_plan(commands: _Commands) -> None:
    plan = commands.group(
        "plan",
        "show the layout of a config, or choose one",
        "No rank is started. `interlace plan CONFIG` is `interlace plan show CONFIG`.",
    )
    show = plan.add(
        "show",
        "planning.show:show",
        "show the layout of a config, with the seconds and bytes of each rank",
        "Also cuts the model into N ranks, with and without frozen awareness. Seconds are of a microbatch, whose size "
        "is printed in tokens. docs/what-ranks-hold.md explains the figures and the keys of --json.",
        config=True,
    )
    show.add_argument("--json", action="store_true", help="print only JSON: the layout, and bytes of each rank")
    show.add_argument("--picture", type=_path, metavar="FILE", help="draw the layout and the memory (PNG or SVG)")
    show.add_argument(
        "--data",
        type=_path,
        metavar="FILE",
        help="read the lengths of the run's first step, and draw the load of each replica of each module, with and "
        "without train.balance (PNG or SVG)",
    )
    show.add_argument("--ranks", type=int, help="ranks of the cuts (default: those of a replica of the config)")
    show.add_argument("--microbatches", type=int, help="microbatches per step (default: the config's)")
    _add_costs(show)
    choose = plan.add(
        "choose",
        "planning.choose:choose",
        "choose a layout for GPUs that are not here, and say why",
        "Chooses placement, degrees, schedule and microbatches. Of the config's [parallel], links and limits always "
        "count; a layout counts only beside parallel.layout = 'auto'. Costs are counted FLOPs.",
        config=True,
    )
    choose.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs; all are used")
    choose.add_argument("--memory", type=float, required=True, metavar="GB", help="memory of each GPU in 10^9 bytes")
    _add_tflops(choose)
    choose.add_argument("--json", action="store_true", help="print only the content of the layout.toml, as JSON")
    choose.add_argument("--picture", type=_path, metavar="FILE", help="draw the best candidates (PNG or SVG)")
    choose.add_argument(
        "--out", type=_path, metavar="FILE", help="layout.toml to write, for `interlace train --layout`"
    )
    _moved(show, "interlace plan choose CONFIG --gpus N --memory GB", "--auto", "--gpus", "--memory")
    _moved(show, "interlace plan choose CONFIG --gpus N --memory GB --out FILE", "--out")


def _add_simulate(commands: _Commands) -> None:
    simulate = commands.group(
        "simulate",
        "simulate one step, or hours of training with node failures",
        "Nothing is trained. `interlace simulate CONFIG` is `interlace simulate step CONFIG`.",
    )
    step = simulate.add(
        "step",
        "planning.step:step",
        "simulate one step of the config's schedule; draw its timeline and write its trace",
        "Seconds are of microbatches whose size is printed in tokens.",
        config=True,
    )
    step.add_argument("--microbatches", type=int, help="microbatches per step (default: the config's)")
    step.add_argument(
        "--spread",
        type=float,
        metavar="SIGMA",
        help="simulate all replicas, with samples whose lengths in tokens are lognormal with this sigma (0: equal)",
    )
    step.add_argument(
        "--out", type=_path, default=Path("."), help="folder for timeline.png and trace.json (default: .)"
    )
    _add_costs(step)
    _add_failures(simulate)
    _moved(step, "interlace simulate failures CONFIG --trace CSV", "--trace")
    _moved(step, "interlace simulate failures --make-trace ec2 (or gcp)", "--make-trace")


def _add_failures(simulate: _Commands) -> None:
    failures = simulate.add(
        "failures",
        "planning.failures:failures",
        "simulate hours of training on nodes that fail and join",
        "Compares three ways to recover: docs/simulated-failures.md.",
    )
    failures.add_argument("config", type=_path, nargs="?", help="TOML file; not with --make-trace")
    _add_set(failures)
    trace = failures.add_mutually_exclusive_group(required=True)
    trace.add_argument("--trace", type=_path, metavar="CSV", help="columns time, node, event (fail or join), warning")
    trace.add_argument("--make-trace", choices=["ec2", "gcp"], help="print a trace with a cloud's published rate")
    failures.add_argument("--hours", type=float, help="length (default: the trace's full hours; --make-trace: 12)")
    failures.add_argument("--nodes", type=int, help="nodes at the start (default: the config's; --make-trace: 30)")
    failures.add_argument("--seed", type=int, default=0, help="seed of --make-trace (default: 0)")
    failures.add_argument("--ranks-per-node", type=int, help="GPUs of a node (default: [resilience])")
    failures.add_argument("--faults", type=int, help="node failures at a time to survive (default: [resilience])")
    failures.add_argument(
        "--min-nodes",
        type=int,
        help="fewest nodes that hold the model (default: [resilience], else from --memory, else 1)",
    )
    failures.add_argument("--memory", type=float, metavar="GB", help="memory of each rank in 10^9 bytes")
    failures.add_argument("--network", type=float, metavar="GB/s", help="into a node (default: the links', else 25)")
    failures.add_argument("--disk", type=float, metavar="GB/s", help="of checkpoints, all nodes together (default: 1)")
    failures.add_argument("--start", type=float, default=10.0, help="seconds to restart all processes (default: 10)")
    failures.add_argument("--regroup", type=float, default=1.0, help="seconds to notice and regroup (default: 1)")
    failures.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    failures.add_argument("--json", action="store_true", help="print all figures as JSON, and nothing else")
    failures.add_argument("--out", type=_path, default=Path("."), help="folder for failures.png (default: .)")
    _add_costs(failures)


def _local(text: str) -> str:
    """Parses a local path of the command line."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _path(text: str) -> Path:
    return Path(_local(text))


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the config, such as train.steps=100; values are TOML; may be repeated",
    )


def _add_media(command: argparse.ArgumentParser) -> None:
    """An option for each modality, and ``--text``."""
    from interlace.modalities import all_modalities

    add = partial(command.add_argument, dest="given", action="append", default=[])
    for modality in all_modalities():
        endings = ", ".join(modality.suffixes)
        add(f"--{modality.name}", type=partial(_media_of, modality.name), metavar="FILE", help=endings)
    text = "a question, after its files; may be repeated"
    add("--text", type=lambda given: ("text", given), metavar="TEXT", help=text)


def _media_of(kind: str, text: str) -> tuple[str, str]:
    return kind, _local(text)


def _add_choice(command: argparse.ArgumentParser) -> None:
    _add_set(command)
    command.add_argument("--step", type=int, help="use the checkpoint of this step (default: the best or the newest)")
    command.add_argument("--raw", action="store_true", help="weights of that step, not their train.ema average")


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile",
        action="store_true",
        help="time each layer on this machine, with a batch of the config's data (default: count FLOPs)",
    )
    command.add_argument(
        "--costs", type=_path, metavar="FILE", help="measured costs: costs.json of a run with log.predict"
    )
    _add_tflops(command)


def _add_tflops(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tflops",
        type=float,
        help="speed of a rank for counted FLOPs, in TFLOP/s (default: that of a matrix product on this machine)",
    )


def _check_cache() -> None:
    """Raises ConfigError if INTERLACE_CACHE is not a local folder."""
    try:
        local_path(os.environ.get("INTERLACE_CACHE", ""))
    except ValueError as error:
        from interlace.train.config.load import ConfigError

        raise ConfigError(f"INTERLACE_CACHE: {error}") from None


def _kind_of(error: Exception) -> tuple[bool, bool]:
    """(the user can correct it, the program knows this error). Modules that were never loaded cannot have raised it."""

    def is_one_of(names: Sequence[str]) -> bool:
        places = (name.rpartition(".") for name in names)
        classes = (getattr(sys.modules.get(f"interlace.{module}"), name, None) for module, _, name in places)
        return isinstance(error, tuple(cls for cls in classes if cls is not None))

    user_error = is_one_of(USER_ERRORS)
    return user_error, user_error or is_one_of(FAILURES)


if __name__ == "__main__":
    sys.exit(main())
