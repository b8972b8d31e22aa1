"""Arguments of the command line: subcommands and their defaults, help texts, refused spellings."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Iterator

import pytest

from interlace.cli import SUBCOMMANDS, main, parser, with_default


def commands(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Parsers of all commands, without those that only have subcommands."""
    groups = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for command in (each for group in groups for each in group.choices.values()):
        yield from commands(command)
    if not groups:
        yield top


COMMANDS = {command.prog.removeprefix("interlace "): command for command in commands(parser())}
CHOOSE = "interlace plan choose CONFIG --gpus N --memory GB"


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command line is refused."""
    with pytest.raises(SystemExit) as error:
        main(arguments.split())
    output = capsys.readouterr()
    assert error.value.code == 2 and output.out == ""
    (line,) = output.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("old", "option", "new"),
    [
        ("doctor --distributed --ranks 2", "--distributed", "interlace doctor cluster"),
        ("doctor --ranks 2 --distributed", "--distributed", "interlace doctor cluster"),
        ("doctor --crash runs", "--crash", "interlace doctor crash RUN"),
        ("doctor --crash=runs", "--crash", "interlace doctor crash RUN"),
        ("doctor cluster --config own.toml", "--config", "interlace doctor cluster CONFIG"),
        ("plan own.toml --auto --gpus 2 --memory 80", "--auto", CHOOSE),
        ("plan --auto own.toml", "--auto", CHOOSE),
        ("plan show own.toml --gpus 2", "--gpus", CHOOSE),
        ("plan own.toml --memory 80", "--memory", CHOOSE),
        ("plan own.toml --out layout.toml", "--out", f"{CHOOSE} --out FILE"),
        ("simulate own.toml --trace a.csv", "--trace", "interlace simulate failures CONFIG --trace CSV"),
        ("simulate own.toml --hours 2 --trace a.csv", "--trace", "interlace simulate failures CONFIG --trace CSV"),
        ("simulate --make-trace ec2", "--make-trace", "interlace simulate failures --make-trace ec2 (or gcp)"),
    ],
)
def test_old_spellings_name_the_new_one(old: str, option: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(old, capsys) == f"interlace: {option} is now: {new}"


@pytest.mark.parametrize(
    ("wrong", "message", "command"),
    [
        ("plan", "the following arguments are required: config", "plan show"),
        ("plan choose own.toml --gpus 2", "the following arguments are required: --memory", "plan choose"),
        ("plan choose own.toml --gpus 2 --memory 8 --profile", "unknown arguments: --profile", "plan choose"),
        ("simulate failures own.toml", "one of the arguments --trace --make-trace is required", "simulate failures"),
        ("simulate failures own.toml --trace a.csv --spread 1", "unknown arguments: --spread 1", "simulate failures"),
        ("simulate own.toml --hours 2", "unknown arguments: --hours 2", "simulate step"),
        ("doctor own.toml", "unknown arguments: own.toml", "doctor machine"),
        ("doctor crash", "the following arguments are required: RUN", "doctor crash"),
    ],
)
def test_wrong_arguments_are_one_line(
    wrong: str, message: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(wrong, capsys) == f"interlace: {message} (see interlace {command} --help)"


def test_a_subcommand_left_out_is_the_first() -> None:
    assert with_default(["doctor"]) == ["doctor", "machine"]
    assert with_default(["plan", "own.toml", "--json"]) == ["plan", "show", "own.toml", "--json"]
    assert with_default(["simulate", "--tflops", "1", "own.toml"]) == ["simulate", "step", "--tflops", "1", "own.toml"]
    for words in ([], ["train", "own.toml"], ["--help"], ["plan", "--help"], ["doctor", "-h"]):
        assert with_default(words) == words
    for command, names in SUBCOMMANDS.items():
        assert {each for each in COMMANDS if each.startswith(f"{command} ")} == {f"{command} {n}" for n in names}
        for name in names:
            assert with_default([command, name, "x"]) == [command, name, "x"]


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("doctor machine", [], ["--ranks", "--crash", "--distributed"]),
        ("doctor cluster", ["--ranks", "--slow", "seconds"], ["--config", "--crash"]),
        ("doctor crash", ["RUN"], ["--ranks", "--timeout"]),
        ("plan show", ["--data", "--ranks", "--profile", "TFLOP/s", "tokens"], ["--auto", "--gpus", "--memory"]),
        ("plan choose", ["--gpus", "10^9 bytes", "TFLOP/s"], ["--ranks", "--data", "--profile", "--auto"]),
        ("simulate step", ["--spread", "--profile", "tokens"], ["--trace", "--make-trace", "--nodes"]),
        ("simulate failures", ["--trace", "--make-trace", "--hours", "GB/s"], ["--spread", "--microbatches"]),
        ("generate", ["tokens"], []),
        ("mask", ["tokens"], []),
        ("data check", ["tokens"], []),
    ],
)
def test_help_has_the_options_of_its_command(command: str, shown: list[str], hidden: list[str]) -> None:
    text = COMMANDS[command].format_help()
    assert [each for each in shown if each not in text] == [each for each in hidden if each in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_function(command: str) -> None:
    run = COMMANDS[command].get_default("function")
    assert callable(pkgutil.resolve_name(f"interlace.train.commands.{run}"))
