"""`interlace doctor cluster`: differences, lost ranks and slow pairs, also with ranks that fail."""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.cli import parser
from interlace.train.commands.cluster import check as cluster
from interlace.train.commands.cluster import facts as facts
from interlace.train.commands.cluster import links as links
from interlace.train.launch import launcher
from tests import forkserver
from tests.cli import TINY

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "clusters.md"
GIB = facts.GIB
PAIR = tuple[float, float]


# ---------------------------------------------------------------------- comparison of facts


def of(host: str = "a", **changed: Any) -> facts.Facts:
    same = {name: "1" for name in facts.EQUAL}
    files = {"__init__.py": "00", "cli.py": "11"}
    rest = {"host": host, "gpu": "", "config": "c" * 64, "files": files, "disk": 9 * GIB, "shared": 9 * GIB}
    return {**same, **rest, "memlock": -1, "settings": {}, **changed}


def test_equal_facts_are_no_trouble() -> None:
    assert facts.compare([of(), of(), of("b")]) == []
    assert facts.compare([of(disk=-1, shared=-1)]) == []  # unknown


@pytest.mark.parametrize("name", facts.EQUAL)
def test_a_version_that_differs_is_named_with_its_ranks(name: str) -> None:
    (trouble,) = facts.compare([of(), of(), of("b", **{name: "2"}), of("b")])
    assert trouble.what == f"{facts.EQUAL[name]} differs: 1 on ranks 0, 1, 3, 2 on rank 2"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"config": "d" * 64}, "the config file differs: cccccccc on ranks 0, 2, dddddddd on rank 1"),
        ({"config": ""}, "none on rank 1"),
        ({"files": {"__init__.py": "00", "cli.py": "12"}}, "rank 1 and rank 0 have other files of interlace: cli.py"),
        ({"files": {"__init__.py": "00"}}, "rank 1 and rank 0 have other files of interlace: cli.py"),
        ({"disk": GIB - 1}, "a has 1.00 GiB free where runs go"),
        ({"shared": (3 << 26) - 1}, "a has 191 MiB free in /dev/shm for 3 ranks"),
    ],
)
def test_what_differs_or_lacks_is_named(changed: dict[str, Any], says: str) -> None:
    (trouble,) = facts.compare([of(), of(**changed), of()])
    assert says in trouble.what and trouble.do


def test_two_ranks_on_one_gpu_are_named() -> None:
    assert facts.compare([of("a", gpu="x, 1"), of("a", gpu="x, 2"), of("b", gpu="x, 1")]) == []
    (trouble,) = facts.compare([of("a", gpu="x, 1"), of("a", gpu="x, 2"), of("a", gpu="x, 1")])
    assert trouble.what == "ranks 0, 2 are on one GPU of a (x, 1)"


def test_settings_that_differ_are_noted_only() -> None:
    several = [of(), of(settings={"NCCL_DEBUG": "INFO"})]
    assert facts.compare(several) == []
    assert facts.settings_that_differ(several) == ["NCCL_DEBUG differs: not set on rank 0, INFO on rank 1"]


def test_the_digest_of_the_package_sees_every_file(tmp_path: Path) -> None:
    (tmp_path / "a" / "__pycache__").mkdir(parents=True)
    for name, text in (("x.py", "1"), ("a/y.py", "2"), ("a/z.so", "3"), ("a/notes.txt", "4")):
        (tmp_path / name).write_text(text)
    before = facts.package_files(tmp_path)
    assert list(before) == ["a/y.py", "a/z.so", "x.py"]
    (tmp_path / "a" / "z.so").write_text("5")
    after = facts.package_files(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["a/z.so"]


# ---------------------------------------------------------------------- pairs


@given(st.integers(1, 40))
def test_rounds_have_every_pair_once_and_no_rank_twice(world: int) -> None:
    rounds = links.rounds(world)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert len(rounds) == (world - 1 if world % 2 == 0 else world) or world == 1


def test_slow_links_are_far_below_the_median_of_their_kind() -> None:
    hosts = {0: "a", 1: "a", 2: "a", 3: "b"}
    inside = [links.Link(0, 1, 0.0, 100.0), links.Link(0, 2, 0.0, 110.0), links.Link(1, 2, 0.0, 24.0)]
    between = [links.Link(rank, 3, 0.0, 10.0) for rank in range(3)]
    assert links.slow(inside + between, hosts, 0.25) == [(inside[2], 100.0)]
    assert links.slow(inside + between, hosts, 0.0) == []
    assert links.slow(inside[1:], hosts, 0.25) == []  # two pairs do not show an outlier


# ---------------------------------------------------------------------- reports of peers


def test_what_a_peer_says_of_another_form_is_refused() -> None:
    mine = facts.gather(None, Path("runs"), "cpu", 0)
    assert cluster._read(json.dumps(mine), facts.Form) == mine
    assert cluster._read("null", None) is None and cluster._read("[1.5, Infinity]", PAIR) == (1.5, float("inf"))
    lacks = {name: value for name, value in mine.items() if name != "disk"}
    odd = [lacks, {**mine, "disk": "much"}, {**mine, "files": ["a"]}, {**mine, "more": 1}, None, [], 3]
    said = [(json.dumps(each), facts.Form) for each in odd]
    said += [(text, PAIR) for text in ("null", "[1.0]", "[1.0, 2.0, 3.0]", '["1", 2.0]', "{}", "[1.0,", "[" * 10**5)]
    said += [("1", bool), ("0.5", None), ('["a"]', list[int])]
    for text, form in said:
        with pytest.raises(ValueError, match="sent a message of another form: run the same version"):
            cluster._read(text, form)


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    script = SCRIPT.format(path=[str(ROOT / "python"), str(ROOT)], fault="", timeout=20.0, out=str(tmp_path))
    process = forkserver.start_script(script, tmp_path / "said", {**launcher.rendezvous(1), "RANK": "0"})
    process.join(600)
    output = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and f"--json {tmp_path}: cannot write there: Is a directory" in output, output
    assert "nothing is wrong" in output and "Traceback" not in output


# ---------------------------------------------------------------------- real processes

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from argparse import Namespace
from interlace.train.commands.cluster import check, facts, links
rank = int(os.environ["RANK"])
{fault}
out = Path({out!r}) if rank == 0 else None
check.cluster(Namespace(config=None, ranks=None, timeout={timeout}, seconds=5.0, slow=0.0, json=out))
"""
FAULTS = {
    "nothing": "",
    # A version, a clock, and a small memory of one kind.
    "lies": """
gather = facts.gather
def lie(*arguments):
    return {**gather(*arguments), "python": "3.9.0", "shared": 1 << 20}
if rank == 1:
    facts.gather = lie
    honest = time.time
    time.time = lambda: honest() + 100.0
""",
    "dies": """
if rank == 2:
    links.measure_pair = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
""",
    "stops": """
if rank == 2:
    links.measure_pair = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
""",
    "late": """
if rank == 2:
    time.sleep(12.0)
""",
    "store": """
if rank == 0:
    links.measure_pair = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
""",
    "speaks otherwise": """
gather = facts.gather
if rank == 1:
    facts.gather = lambda *arguments: {**gather(*arguments), "disk": "much"}
""",
    "fails": """
def fail(*_):
    raise RuntimeError("the card has no link")
if rank == 1:
    facts.gather = fail
""",
}


def examined(fault: str, timeout: float, folder: Path) -> tuple[list[int | None], dict[str, Any], list[str]]:
    """Exit codes of three ranks, the report, and the output of each."""
    out, met = folder / "report.json", launcher.rendezvous(3)
    fault = FAULTS[fault]
    script = SCRIPT.format(path=[str(ROOT / "python"), str(ROOT)], fault=fault, timeout=timeout, out=str(out))
    processes = [
        forkserver.start_script(script, folder / f"said-{rank}", {**met, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(3)
    ]
    try:
        stopped = fault == FAULTS["stops"]
        for process in processes[:2] if stopped else processes:
            process.join(600)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    output = [(folder / f"said-{rank}").read_text() for rank in range(3)]
    return codes, json.loads(out.read_text()) if out.exists() else {}, output


def test_a_rank_that_differs_is_found_and_the_rest_is_measured(tmp_path: Path) -> None:
    codes, report, said = examined("lies", 20.0, tmp_path)
    assert codes == [1, 1, 1] and report["ok"] is False, said
    whats = [trouble["what"] for trouble in report["troubles"]]
    assert any(re.match(r"Python differs: .* on ranks 0, 2, 3\.9\.0 on rank 1", what) for what in whats), whats
    assert any("1 MiB free in /dev/shm for 3 ranks" in what for what in whats), whats
    assert any(re.match(r"the clock of rank 1 is \+(99|100)\.", what) for what in whats), whats
    assert len(whats) == 3 and all(f"wrong: {what}" in said[0] for what in whats)
    assert abs(report["clocks"][2]["ahead"]) <= report["clocks"][2]["bound"] + 1e-3  # one machine, one clock
    assert sorted((link["first"], link["second"]) for link in report["links"]) == [(0, 1), (0, 2), (1, 2)]
    assert all(link["bandwidth"] > 0 and link["latency"] > 0 for link in report["links"])
    assert [each["host"] for each in report["all_reduce"]] == [None] and report["all_reduce"][0]["bandwidth"] > 0
    assert [each["python"] for each in report["ranks"]][1] == "3.9.0"


@pytest.mark.slow
def test_a_rank_that_dies_among_the_pairs_is_named(tmp_path: Path) -> None:
    codes, report, said = examined("dies", 4.0, tmp_path)
    assert codes == [1, 1, -9], (codes, said)
    whats = [trouble["what"] for trouble in report["troubles"]]
    assert any(what.startswith("no answer from rank 2 within 4 s, measuring pairs of ranks, round") for what in whats)
    assert "wrong: no answer from rank 2" in said[0]


@pytest.mark.slow
def test_three_ranks_that_agree_are_well(tmp_path: Path) -> None:
    codes, report, said = examined("nothing", 30.0, tmp_path)
    assert codes == [0, 0, 0] and report["ok"] is True and not report["troubles"], said
    assert "nothing is wrong" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes", "says"),
    [
        ("stops", [1, 1, None], "no answer from rank 2 within 4 s, measuring pairs of ranks"),
        ("late", [1, 1, 1], "no answer from rank 2 within 4 s, coming"),
        ("speaks otherwise", [1, 1, 1], "rank 1, reading its facts: sent a message of another form"),
        ("fails", [1, 1, 1], "rank 1, reading its facts: the card has no link"),
    ],
)
def test_what_breaks_is_named(fault: str, codes: list[int | None], says: str, tmp_path: Path) -> None:
    result, report, said = examined(fault, 4.0, tmp_path)
    assert result == codes, said
    assert any(trouble["what"].startswith(says) for trouble in report["troubles"]), (report, said)


@pytest.mark.slow
def test_a_rank_0_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    codes, report, said = examined("store", 4.0, tmp_path)
    assert codes == [-9, 1, 1] and not report, said
    for rank in (1, 2):
        assert f"rank {rank}: " in said[rank] and "rank 0" in said[rank].split(f"rank {rank}: ", 1)[1], said[rank]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_agents(*words: str) -> list[tuple[int, str]]:
    """Exit code and output of two agents of torchrun, with one rank each, that rendezvous on this machine."""
    endpoint = f"127.0.0.1:{_free_port()}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--rdzv-id",
        "test",
        "--local-addr",
        "127.0.0.1",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*command, "-m", "interlace", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        output = [agent.communicate(timeout=600)[0] for agent in agents]
        return [(agent.returncode, text) for agent, text in zip(agents, output, strict=True)]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


@pytest.mark.slow
def test_two_agents_of_torchrun_examine_and_train(tmp_path: Path) -> None:
    """As on two hosts with shared files: `docs/clusters.md`."""
    config = tmp_path / "tiny.toml"
    config.write_text(TINY.format(folder=tmp_path))
    out = tmp_path / "report.json"
    result = two_agents("doctor", "cluster", str(config), "--slow", "0", "--json", str(out))
    assert [code for code, _ in result] == [0, 0], result
    report = json.loads(out.read_text())
    assert report["ok"] and report["world"] == 2 and len({each["config"] for each in report["ranks"]}) == 1
    result = two_agents("train", str(config), "--set", "log.samples=0", "--set", "log.accuracy_samples=0")
    assert [code for code, _ in result] == [0, 0], result
    assert (tmp_path / "tiny" / "latest" / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.slow
def test_distributed_doctor_starts_ranks_and_reports_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "interlace", "doctor", "cluster"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=600, env=environment)
        return copy.copy(done)

    good = run("--ranks", "2", "--slow", "0")
    assert good.returncode == 0 and "nothing is wrong" in good.stdout, good
    bad = run("--ranks", "2", str(tmp_path / "none.toml"))
    assert bad.returncode == 1 and "none.toml" in bad.stdout, bad
    unknown = run()
    assert unknown.returncode == 2 and "--ranks N" in unknown.stderr, unknown


# ---------------------------------------------------------------------- the scripts of the page


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(), flags=re.S)


def test_the_shell_scripts_of_the_page_can_be_read_by_a_shell() -> None:
    scripts = _blocks("bash")
    assert len(scripts) == 7
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, (done.stderr, script)


def test_the_manifests_of_the_page_are_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="no YAML parser is installed")
    text, elastic = _blocks("yaml")
    service, claim, coordinator, job = yaml.safe_load_all(elastic)
    pod = coordinator["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert [each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"]] == [
        claim["metadata"]["name"]
    ]
    (container,) = pod["spec"]["containers"]
    (words,) = container["args"]
    _, _, *options = words.replace("$(hostname -i)", "127.0.0.1").split()
    result = parser().parse_args(options)
    assert [result.port, result.store_port] == [each["port"] for each in service["spec"]["ports"]]
    assert str(result.state.parent) == container["volumeMounts"][0]["mountPath"]
    (rule,) = coordinator["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"] and pod["spec"]["restartPolicy"] == "Never"
    assert job["kind"] == "Job" and job["spec"]["parallelism"] == job["spec"]["completions"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "--elastic" in container["command"] and 'resilience.coordinator="coordinator:29600"' in container["command"]
    runtime, job = yaml.safe_load_all(text)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
