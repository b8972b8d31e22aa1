"""Command line: ``interlace train | coordinator | generate | export | doctor | data | mask | plan | simulate``.

Every command imports its modules when it runs, so that ``--help`` and a wrong option answer at once. An error that the
user can correct (config, files, ranks) is one line and exit code 2. A failed run is one line and exit code 1. A bug in
the program keeps its traceback. ``--debug`` shows the traceback of all of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from interlace.train.config.local_paths import local_path

CHECKPOINT = "run folder (its best checkpoint where it keeps that, else its newest) or one checkpoint folder"
DESCRIPTION = "Train multimodal language models with bitfield attention and a scheduled pipeline."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = parser().parse_args(arguments)
    from interlace.train.launch import launcher

    try:
        if options.command is None:
            parser().print_help()
            code = 0
        else:
            _check_cache()
            code = _command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interlace: interrupted", file=sys.stderr)
        return 130
    except SystemExit as leaving:  # rich raises it for a broken pipe
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return _unread()
    except BrokenPipeError:
        if options.command == "train":  # training never ends because stdout was closed
            raise
        return _unread()
    except Exception as error:
        user_error, known = _kind_of(error)
        if launcher.under_launcher():
            launcher.report_error(error, user_error=user_error and not options.debug, known=known and not options.debug)
        elif options.debug or not known:
            raise
        else:
            print(f"interlace: {error}", file=sys.stderr)
        return launcher.USER_ERROR if user_error else 1


def _unread() -> int:
    """Exit code if the reader of stdout closed it early (``| head``): success."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes stdout once more at exit
    os.close(nowhere)
    return 0


def parser() -> argparse.ArgumentParser:
    """The argument parser with all commands."""
    top = argparse.ArgumentParser(prog="interlace", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=_version())
    top.set_defaults(debug=False)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    config = argparse.ArgumentParser(add_help=False, parents=[common])
    config.add_argument("config", type=_path, help="TOML file, such as configs/stamps.toml")
    _add_set(config)
    commands = top.add_subparsers(dest="command", metavar="command")

    train = commands.add_parser(
        "train",
        parents=[common],
        help="train a config; starts its ranks, or is one under torchrun",
        description="Train a config. Starts the ranks that it asks for, or is one of them under torchrun; they "
        "compute where run.device says, on GPUs or CPUs. Exit code: 0 when all steps are done, 143 or 130 when SIGTERM "
        "or Ctrl-C ended the saved run.",
    )
    train.add_argument("config", type=_path, nargs="?", help="TOML file; with --resume by default the run's own")
    _add_set(train)
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from a run folder or one of its checkpoints; without a path, the newest run of the config's name",
    )
    train.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume: take the run folder from the job that holds it, which then ends with an error",
    )

    train.add_argument(
        "--lock",
        type=_path,
        metavar="FILE",
        help="of a config with parallel = 'auto': the layout that this plan.lock has, in place of a new choice",
    )

    train.add_argument(
        "--elastic",
        action="store_true",
        help="be one node of a run that nodes may leave and join, as [resilience] says; without resilience.coordinator "
        "all nodes, on this machine",
    )

    coordinator = commands.add_parser(
        "coordinator",
        parents=[common],
        help="say who trains together in an elastic run; on a machine that outlives the nodes",
        description="Serve one elastic run: nodes that `interlace train CONFIG --elastic` starts connect here "
        "(resilience.coordinator). A lost node is noticed, and the others are told how to go on without it. With "
        "--state it may be killed and started again, with the same words: nodes wait for it. Without, the run does not "
        "outlive it. Keep it off the nodes that train. Exit code: 0 when the run has trained to the end, 143 when it "
        "was saved because too many nodes were asked to go, 1 when it has not, 2 when the run of --state is over.",
    )
    coordinator.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    coordinator.add_argument("--port", type=int, required=True, help="for supervisors, one per node; 0: any")
    coordinator.add_argument("--store-port", type=int, default=0, help="for ranks (default: any that is free)")
    coordinator.add_argument(
        "--state", type=_path, metavar="FILE", help="keep what a coordinator that is started again has to know"
    )
    coordinator.add_argument("--journal", type=_path, metavar="FILE", help="append what happens, as JSON lines")

    generate = commands.add_parser(
        "generate", parents=[common], help="answer from a checkpoint: images and/or speech and/or text -> text"
    )
    generate.add_argument("run", type=_path, help=CHECKPOINT)
    generate.add_argument("--image", type=_path, action="append", default=[], help="PNG, JPEG or SVG; may be repeated")
    generate.add_argument("--speech", type=_path, action="append", default=[], help="OGG, WAV or FLAC; may be repeated")
    generate.add_argument("--prompt", default="", help="text after the media")
    _add_choice(generate)
    generate.add_argument("--max-new-tokens", type=int, default=96, help="longest answer, in tokens (default: 96)")

    export = commands.add_parser(
        "export",
        parents=[common],
        help="write a checkpoint of a run as HuggingFace loads it",
        description="Write the model of a run's checkpoint: a whole HuggingFace model key for key as it came, with "
        "its tokenizer and processor; one that was put together from modules as a folder per module.",
    )
    export.add_argument("run", type=_path, help=CHECKPOINT)
    export.add_argument("folder", type=_path, help="folder to write, which must not hold anything")
    _add_choice(export)
    export.add_argument(
        "--adapter", action="store_true", help="write the adapters of a LoRA run alone, as peft loads them (not merged)"
    )

    export.add_argument(
        "--check",
        type=int,
        metavar="N",
        help="then answer N held-out questions with HuggingFace's own classes from FOLDER and compare prompts and "
        "tokens with Interlace's, as trained; exit code 1 where they differ",
    )

    doctor = commands.add_parser("doctor", parents=[common], help="what this machine can run, or why a run failed")
    doctor.add_argument(
        "--crash",
        type=_path,
        metavar="FOLDER",
        help="say who waited for whom, from what the ranks of a failed run left",
    )

    doctor.add_argument(
        "--distributed",
        action="store_true",
        help="whether the ranks of a job fit together: under torchrun, or with --ranks or --config on this machine",
    )
    doctor.add_argument("--config", type=_path, help="with --distributed: the config of the run, compared byte by byte")
    doctor.add_argument("--ranks", type=int, help="with --distributed: ranks to start here (default: the config's)")
    doctor.add_argument(
        "--timeout", type=float, default=30.0, help="with --distributed: seconds that a rank may be late (default: 30)"
    )
    doctor.add_argument(
        "--seconds", type=float, default=60.0, help="with --distributed: seconds for measuring pairs (default: 60)"
    )
    doctor.add_argument(
        "--slow", type=float, default=0.25, help="with --distributed: the part of the median below which a pair is slow"
    )
    doctor.add_argument("--json", type=_path, metavar="FILE", help="with --distributed: write the report there")

    data = commands.add_parser(
        "data", parents=[common], help="check files of chats, or make them of pictures or to try things with"
    )
    actions = data.add_subparsers(dest="action", metavar="action", required=True)
    check = actions.add_parser(
        "check",
        parents=[common],
        help="lengths, broken records and files, and a page of samples as the model will see them",
        description="Read all records of a config's data, or of files alone (JSON lines, JSON, parquet, folders of "
        "datasets), and say what is in them: lengths, what is cut or left out and why. With a config samples are shown "
        "in tokens, as its model will see them. Exit code: 0 when all is well, 1 when something is broken, 2 when the "
        "files cannot be read at all.",
    )
    check.add_argument("files", type=_path, nargs="+", metavar="CONFIG|FILE", help="a TOML file, or files of chats")
    _add_set(check)
    check.add_argument("--samples", type=int, default=12, help="samples on the page; 0 writes none (default: 12)")
    check.add_argument("--out", type=_path, default=Path("data.html"), help="page to write (default: data.html)")
    check.add_argument(
        "--list", action="store_true", help="print each record that is left out or cut, and each key that is ignored"
    )
    check.add_argument("--headers", action="store_true", help="read headers of pictures and clips, decode none: faster")

    index = actions.add_parser(
        "index",
        parents=[common],
        help="look through large data once, by several processes: where records begin, how large they and media are",
        description="Make the index of a config's data, or of files alone, which training and check otherwise make on "
        "first use. Goes on where it was interrupted; of a file that was appended to only what is new is read. Exit "
        "code: 0 when all records can be used, 1 when some are broken, 2 when the files cannot be read at all.",
    )
    index.add_argument("files", type=_path, nargs="+", metavar="CONFIG|FILE", help="a TOML file, or files of chats")
    _add_set(index)
    index.add_argument("--processes", type=int, metavar="N", help="processes at a time (default: one per core)")
    index.add_argument("--decode", action="store_true", help="of files alone: decode all media once")
    index.add_argument(
        "--sizes",
        choices=["files", "records"],
        default="files",
        help="of files alone: where sizes of media come from, as data.sizes of a config says (default: files)",
    )
    index.add_argument(
        "--media", type=_local, metavar="FOLDER", help="of files alone: where relative paths of media start"
    )
    index.add_argument("--cache", type=_local, metavar="FOLDER", help="of files alone: where the index is kept")

    folder = actions.add_parser(
        "folder",
        parents=[common],
        help="chats about the pictures of a folder: sub-folders' names or texts beside them are the answers",
        description="Write a file of chats, JSON lines, about the pictures in a folder. The answer about a picture is "
        "what NAME.txt beside NAME.png says or, where no picture has such a text, the name of its sub-folder. All "
        "pictures are decoded once. Exit code: 0 when all are in, 1 when some are left out, each by name, 2 when there "
        "is nothing to write.",
    )
    folder.add_argument(
        "folder", type=_path, metavar="PICTURES", help="folder of pictures, in sub-folders or with texts"
    )
    folder.add_argument("--out", type=_path, default=Path("chats.jsonl"), help="file to write (default: chats.jsonl)")
    folder.add_argument(
        "--question", help="asked about each (default: 'What is it?', of texts 'Describe the picture.')"
    )
    folder.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="keep this share of each answer's pictures for NAME.held-out.jsonl, equal pictures on one side (default: "
        "0, none; data.held_out of a config keeps records)",
    )

    stamps = actions.add_parser(
        "stamps",
        parents=[common],
        help="chats about pictures and speech to try things with: fetched, with a tokenizer",
        description="Write a folder of chats about Debian's Tux Paint stamps: train.jsonl, validation.jsonl, media, "
        "tokenizer and a README that says what was left out. The package is fetched with apt (157 MB, installed "
        "nowhere) on first use; without it the folder holds scikit-learn's digits in the same form. A folder that was "
        "made with the same options stays as it is.",
    )
    stamps.add_argument("folder", type=_path, metavar="FOLDER", help="folder to write: a new one, or one made before")
    stamps.add_argument("--records", type=int, metavar="N", help="chats to train on (default: 19200)")
    stamps.add_argument("--seed", type=int, metavar="N", help="of everything that is drawn (default: 0)")
    stamps.add_argument("--languages", nargs="+", metavar="CODE", help="such as en fr (default: ten)")
    stamps.add_argument(
        "--cache", type=_local, metavar="FOLDER", help="where the package is kept, as data.cache of a config says"
    )

    mask = commands.add_parser("mask", parents=[config], help="draw the attention mask of a config's batch")
    mask.add_argument("--samples", type=int, default=4, help="samples packed into the row (default: 4)")
    mask.add_argument("--out", type=_path, default=Path("mask.png"), help="picture to write (default: mask.png)")

    plan = commands.add_parser(
        "plan",
        parents=[config],
        help="show a config's layout and the memory of its ranks, and cut its model over N ranks",
        description="Show which rank runs what of a config, how long it takes and how many bytes each rank would hold; "
        "and cut the model over N ranks, with and without frozen awareness. Nothing is allocated or started. The keys "
        "of --json are explained in docs/what-ranks-hold.md.",
    )
    plan.add_argument("--json", action="store_true", help="print the layout and the memory as JSON, and nothing else")
    plan.add_argument("--picture", type=_path, metavar="FILE", help="draw the layout and the memory (PNG or SVG)")
    plan.add_argument(
        "--data",
        type=_path,
        metavar="FILE",
        help="read the lengths of the run's first step and draw what each replica of each module computes, as drawn "
        "and with train.balance (PNG or SVG)",
    )
    plan.add_argument("--ranks", type=int, help="ranks of a replica (default: the config's)")
    plan.add_argument("--microbatches", type=int, help="microbatches per step (default: the config's)")
    _add_costs(plan)
    plan.add_argument(
        "--auto",
        action="store_true",
        help="choose placement, degrees, schedule and microbatches for --gpus GPUs and say why; a layout in [parallel] "
        "counts only beside parallel.plan = 'auto', its links always",
    )
    plan.add_argument("--gpus", type=int, metavar="N", help="with --auto: GPUs to use, all of them")
    plan.add_argument("--memory", type=float, metavar="GB", help="with --auto: memory of each GPU in 10^9 bytes")
    plan.add_argument("--out", type=_path, metavar="FILE", help="with --auto: write the plan.lock there")

    simulate = commands.add_parser(
        "simulate",
        parents=[common],
        help="play the config's schedule: picture and trace; or what failures cost",
        description="Play one step of the config's schedule, and draw it; or, with --trace, hours of training on nodes "
        "that fail and come (docs/simulated-failures.md).",
    )
    simulate.add_argument("config", type=_path, nargs="?", help="TOML file; not for --make-trace")
    _add_set(simulate)
    simulate.add_argument("--microbatches", type=int, help="microbatches per step (default: the config's)")
    simulate.add_argument(
        "--spread",
        type=float,
        metavar="SIGMA",
        help="play all replicas, with samples of lognormal lengths of this sigma (0: alike), as arrays",
    )
    simulate.add_argument("--out", type=_path, default=Path("."), help="folder for the pictures and trace.json")
    _add_costs(simulate)
    _add_failures(simulate)
    return top


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
        help="change one key, such as --set train.steps=100; values are TOML; may be repeated",
    )


def _add_choice(command: argparse.ArgumentParser) -> None:
    _add_set(command)
    command.add_argument("--step", type=int, help="the checkpoint of this step (default: the best or the newest)")
    command.add_argument(
        "--raw", action="store_true", help="the weights of that step, not their averages (of a run with train.ema)"
    )


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile",
        action="store_true",
        help="time every layer on this machine with a batch of the config's data (default: count FLOPs)",
    )
    command.add_argument(
        "--costs", type=_path, metavar="FILE", help="costs.json of a run with log.predict: layers and links, measured"
    )
    command.add_argument(
        "--tflops", type=float, help="speed of a rank when FLOPs are counted (default: of a matrix product here)"
    )


def _add_failures(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("failures of nodes", "without --trace or --make-trace none of these counts")
    group.add_argument("--trace", type=_path, metavar="CSV", help="columns time, node, event (fail or join), warning")
    group.add_argument("--make-trace", choices=["ec2", "gcp"], help="print a trace with a cloud's published rate")
    group.add_argument("--hours", type=float, help="how long (default: the trace's full hours; --make-trace: 12)")
    group.add_argument("--nodes", type=int, help="nodes at the start (default: the config's; --make-trace: 30)")
    group.add_argument("--seed", type=int, default=0, help="of --make-trace (default: 0)")
    group.add_argument("--ranks-per-node", type=int, help="GPUs of a node (default: [resilience])")
    group.add_argument("--faults", type=int, help="failures at a time to survive (default: [resilience])")
    group.add_argument(
        "--min-nodes",
        type=int,
        help="fewest that hold the model (default: as [resilience] says, else by --memory, else 1)",
    )
    group.add_argument("--memory", type=float, metavar="GB", help="of each rank, for --min-nodes")
    group.add_argument("--network", type=float, metavar="GB/S", help="into a node (default: the links', else 25)")
    group.add_argument("--disk", type=float, metavar="GB/S", help="of checkpoints, all nodes together (default: 1)")
    group.add_argument("--start", type=float, default=10.0, help="seconds to start all anew (default: 10)")
    group.add_argument("--regroup", type=float, default=1.0, help="seconds to notice and regroup (default: 1)")
    group.add_argument("--save-every", type=int, default=10, help="iterations between checkpoints (default: 10)")
    group.add_argument("--json", action="store_true", help="print all figures as JSON, and nothing else")


def _command(options: argparse.Namespace) -> int:
    if options.command == "train":
        from interlace.train.commands.train import train

        return train(options)
    if options.command == "coordinator":
        from interlace.train.commands.elastic import coordinate

        return coordinate(options)
    if options.command == "generate":
        from interlace.train.commands.generate import generate

        return generate(options)
    if options.command == "export":
        from interlace.train.commands.export import export

        return export(options)
    if options.command == "mask":
        from interlace.train.commands.mask import mask

        return mask(options)
    if options.command == "data":
        if options.action == "stamps":
            from interlace.train.commands.stamps import stamps

            return stamps(options)
        from interlace.train.commands import data

        return {"check": data.check, "folder": data.folder, "index": data.index}[options.action](options)
    if options.command == "doctor":
        if options.crash is not None:
            from interlace.train.commands.crash import crash

            return crash(options.crash)
        if options.distributed:
            from interlace.train.commands.cluster.check import doctor_distributed

            return doctor_distributed(
                options.config, options.ranks, options.timeout, options.seconds, options.slow, options.json
            )
        from interlace.train.commands.doctor import doctor

        return doctor()
    if options.command == "simulate":  # makes few cycles; gc takes 1 s of 10 s for a cluster
        gc.disable()
    try:
        from interlace.train.commands.planning import plan as planning

        return planning.plan(options) if options.command == "plan" else planning.simulate(options)
    finally:
        gc.enable()


def _check_cache() -> None:
    """Raises ConfigError if INTERLACE_CACHE is not a local folder."""
    try:
        local_path(os.environ.get("INTERLACE_CACHE", ""))
    except ValueError as error:
        from interlace.train.config.load import ConfigError

        raise ConfigError(f"INTERLACE_CACHE: {error}") from None


def _kind_of(error: Exception) -> tuple[bool, bool]:
    """(the user can correct it, the program knows this error). Modules that were never loaded cannot have raised it."""
    users = {"interlace.train.config.load": "ConfigError", "interlace.train.checkpoint.storage": "CheckpointError"}
    users |= {"interlace.data.media": "DecodeError"}
    failures = {"interlace.train.errors": "TrainingError", "interlace.run.errors": "PipelineError"}
    failures |= {"interlace.comm.process.errors": "CommError"}
    failures |= {"interlace.resilience.errors": "ResilienceError"}

    def is_one_of(table: dict[str, str]) -> bool:
        classes = (getattr(sys.modules.get(module), name, None) for module, name in table.items())
        return isinstance(error, tuple(cls for cls in classes if cls is not None))

    return is_one_of(users), is_one_of(users | failures)


def _version() -> str:
    from interlace import __version__

    return f"interlace {__version__}"


if __name__ == "__main__":
    sys.exit(main())
