"""``interlace train CONFIG --elastic`` (one node of an elastic run) and ``interlace coordinator``."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from interlace.train.config.load import ConfigError, dumps
from interlace.train.config.sections import Config
from interlace.train.elastic.config import check, settings_of
from interlace.train.launch import launcher

KILL_AFTER = 5.0  # seconds after a node's notice


def coordinate(options: argparse.Namespace) -> int:
    """``interlace coordinator``: serves until its run is over."""
    from interlace.resilience.coordinator.process import Coordinator
    from interlace.resilience.errors import ResilienceError

    if options.state is not None and not options.port:
        raise ConfigError(
            "--state is for a coordinator that is started again where nodes know it: give a --port, not 0"
        )
    files = {"journal": options.journal, "state": options.state}
    try:
        serving = Coordinator(options.host, options.port, options.store_port, launcher.note, **files)
    except OSError as error:
        raise ConfigError(
            f"{error}: give an address of this machine as --host, free ports, and files that can be written"
        ) from error
    except ResilienceError as error:
        raise ConfigError(f"--state: {error}") from error
    with launcher.leaving_on_sigterm(), serving:
        launcher.note(f"coordinator at {options.host}:{serving.port}, its store at port {serving.store_port}")
        return serving.run() or 0


def supervise(options: argparse.Namespace, config: Config, path: Path) -> int:
    """Runs one node of an elastic run. If no coordinator is configured, runs one and all nodes on this machine."""
    check(config, source=str(path))
    if config.resilience.coordinator is None:
        return _on_this_machine(options, config, path)
    from interlace.resilience.supervisor.process import Supervisor

    own = config.resilience
    environment = {launcher.CONFIG: dumps(config), launcher.SOURCE: str(path)}
    if "OMP_NUM_THREADS" not in os.environ or config.parallel.threads:
        environment["OMP_NUM_THREADS"] = str(config.parallel.threads or launcher.default_threads(own.ranks_per_node))
    node = Supervisor(
        str(own.coordinator),
        launcher.rank_command(path, debug=options.debug, resume=options.resume),
        settings_of(config),
        host=platform.node() or "node",
        logs=Path(config.run.folder) / config.run.name / "nodes",
        notice=own.notice,
        environment=environment,
        say=launcher.note,
    )
    return node.run()


def _on_this_machine(options: argparse.Namespace, config: Config, path: Path) -> int:
    """Runs the coordinator in this process and all nodes on this machine, for trials."""
    from interlace.resilience.coordinator.process import PREEMPTED, Coordinator
    from interlace.train.data.feed import prepare

    prepare(config, launcher.note, source=str(path))
    own = config.resilience
    environment = {
        "OMP_NUM_THREADS": str(config.parallel.threads or launcher.default_threads(own.nodes * own.ranks_per_node))
    }
    with Coordinator("127.0.0.1", 0, say=launcher.note) as serving:
        command = [*launcher.rank_command(path, debug=options.debug, resume=options.resume), "--elastic"]
        for change in (*options.set, f'resilience.coordinator="127.0.0.1:{serving.port}"'):
            command += ["--set", change]
        launcher.note(f"{own.nodes} nodes start on this machine; one more: {shlex.join(['interlace', *command[3:]])}")
        nodes = [
            subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
            for _ in range(own.nodes)
        ]
        signals: list[int] = []

        def pass_on(number: int) -> None:
            """Lets all nodes save and stop the run; a second Ctrl-C ends it at once."""
            signals.append(number)
            for node in nodes:
                if node.poll() is None:
                    node.send_signal(number)

        try:
            with launcher.handling(pass_on):
                code = serving.run(abandoned=lambda: all(node.poll() is not None for node in nodes))
        finally:
            _end(nodes, KILL_AFTER if sys.exc_info()[0] is None else 0.0)
    if code is None or code == 1:
        users = any(node.returncode == launcher.USER_ERROR for node in nodes)
        return launcher.USER_ERROR if users else 1
    return 128 + signals[0] if code == PREEMPTED and signals else code


def _end(nodes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    for node in nodes:
        try:
            node.wait(seconds)
        except subprocess.TimeoutExpired:
            node.kill()  # its ranks die with it
            node.wait()
