"""Static gate: kernels compile for absent GPUs, and have no problems except accepted ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from bench import kernel_exceptions, kernel_report, triton_versions
from bench.compile_worker import Configuration
from bench.kernel_exceptions import Accepted, Problem
from bench.triton_versions import ROOT, VERSIONS
from tests.bench.loops import used
from tests.sampling import sample

PARTS = {
    "attention": (
        "forward_kernel",
        "query_gradient_kernel",
        "key_gradient_kernel",
        "key_gradient_kernel fused",
        "key_gradient_kernel of keys",
        "key_gradient_kernel of values",
    ),
    "gluon": ("gluon_forward_kernel", "gluon_query_gradient_kernel", "gluon_key_gradient_kernel"),
    "plan": (
        "summary_kernel",
        "classify_kernel",
        "decide_kernel",
        "list_kernel q-major",
        "list_kernel k-major",
        "documents_kernel of queries",
        "documents_kernel of keys",
        "map_kernel of queries",
        "map_kernel of keys",
    ),
    "ranks": ("reduce_ranks_kernel", "copy_kernel"),
}
USED = dict(registers=100, shared=1000, spills=0, wgmma=8, mma=0, tcgen=0, tma=0)


def check(version: str, configurations: list[Configuration]) -> None:
    """Raises Unavailable if this Triton is not available."""
    report = kernel_report.compile_all(configurations, version)
    for configuration, kernels in report.items():
        expected = set(PARTS[configuration.part])
        if configuration.dtype == "float32" or configuration.head_dim > 128 or configuration.architecture != 100:
            expected.discard("key_gradient_kernel fused")
        if configuration.variant != "plain":  # Triton's
            expected -= {"gluon_query_gradient_kernel", "gluon_key_gradient_kernel"}
        apart = {"key_gradient_kernel of keys", "key_gradient_kernel of values"}
        hopper = configuration.architecture == 90 and configuration.dtype != "float32"
        expected -= {"key_gradient_kernel"} if hopper and configuration.head_dim > 128 else apart
        assert expected <= set(kernels), configuration
    assert not kernel_exceptions.changes(report, version)


@pytest.mark.parametrize("version", [VERSIONS[0], *(pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS[1:])])
def test_hopper(version):
    """The head size of most models; the others are slow."""
    try:
        check(version, [Configuration(90, 128, "bfloat16")])
    except triton_versions.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_hot_loops_on_hopper(version):
    try:
        check(version, kernel_report.main_shapes())
    except triton_versions.Unavailable as reason:
        pytest.skip(str(reason))


# `python -m bench.kernel_report` compiles each configuration under each Triton; here each is compiled under one.
# A run compiles a sample of them (tests.sampling).
DEALT = {version: kernel_report.tested()[place :: len(VERSIONS)] for place, version in enumerate(VERSIONS)}


def test_each_triton_is_dealt_configurations_of_all_kinds():
    assert sorted(itertools.chain(*DEALT.values())) == sorted(kernel_report.tested())
    for dealt in DEALT.values():
        assert [set(values) for values in zip(*dealt)] == [set(values) for values in zip(*kernel_report.tested())]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_configuration():
    with ThreadPoolExecutor() as pool:  # one process each
        checks = []
        for version, dealt in DEALT.items():
            plans, others = ([c for c in dealt if (c.part == "plan") == plan] for plan in (True, False))
            checks.append(pool.submit(check, version, [*plans, *sample(others, 6)]))
    errors = [error for check_ in checks if (error := check_.exception()) is not None]
    for error in errors:
        if not isinstance(error, triton_versions.Unavailable):
            raise error
    if errors:
        pytest.skip(str(errors[0]))


WHERE = Configuration(90, 128, "bfloat16")


@pytest.mark.parametrize(
    ("kernel", "change", "problem", "figure"),
    [
        ("forward_kernel", {"spills": 4}, "spills", 4),
        ("sum_kernel", {"spills": 4, "wgmma": 0}, "spills", 4),
        ("forward_kernel", {"shared": 232_449}, "more than 232448 bytes of shared memory", 232_449),
        ("forward_kernel", {"wgmma": 0, "mma": 6}, "no wgmma; HMMA", 6),
        ("gluon_forward_kernel", {"wgmma": 0, "tma": 2}, "no wgmma; HMMA", 0),
        ("gluon_forward_kernel", {}, "no UTMALDG", 0),
        ("forward_kernel", {"loops": [{}]}, "hot loops", 1),
    ],
)
def test_problems_of_a_kernel(kernel, change, problem, figure):
    result = kernel_exceptions.problems({WHERE: {kernel: {**USED, **change}}}, "3.9.0")
    assert result == {Problem(kernel, "90", "128", "bfloat16", "plain", "", problem): figure}


def test_kernels_without_problems():
    assert not kernel_exceptions.problems(
        {WHERE: {"forward_kernel": USED, "sum_kernel": {**USED, "wgmma": 0}}}, "3.9.0"
    )
    exact = WHERE._replace(dtype="float32")
    assert not kernel_exceptions.problems({exact: {"forward_kernel": {**USED, "wgmma": 0}}}, "3.9.0")


def test_the_gate_fails_on_every_change():
    spills = Problem("forward_kernel", "90", "128", "bfloat16", "plain", "", "spills")
    accepted = {
        spills: Accepted({"3.9.0": 4}, "few"),
        spills._replace(head_dim="64"): Accepted({"3.9.0": 4}, "not compiled here"),
    }

    def changes(spilled: int, version: str = "3.9.0") -> list[str]:
        report = {WHERE: {"forward_kernel": {**USED, "spills": spilled}}}
        return [words.split(":")[0] for words in kernel_exceptions.changes(report, version, accepted)]

    assert changes(4) == []
    assert changes(8) == changes(2) == ["changed"]
    assert changes(0) == ["gone"]
    assert changes(4, "3.6.0") == ["new"] and changes(0, "3.6.0") == []
    accepted[spills] = Accepted({"3.9.0": 4}, "")
    assert changes(4) == ["no reason given"]


def test_full_loops_issue_no_more_than_before():
    """Instruction counts of the main shapes do not exceed the former ones; a forward of 4,000 per iteration does."""
    change = {"tile": used()["tile"], "loops": used(instructions=4000)["loops"]}
    result = kernel_exceptions.problems({WHERE: {"forward_kernel": {**USED, **change}}}, "3.9.0")
    assert [(problem.loop, problem.problem) for problem in result] == [("FULL", "instructions over before")]
    assert {row.configuration for rows in kernel_report.read_before().values() for row in rows} == {
        *kernel_report.main_shapes()
    }


def test_accepted_problems_are_of_kernels_in_use():
    kernels = {
        (kernel, str(c.architecture), kernel_exceptions.head_dims(c), c.dtype, c.variant)
        for c in kernel_report.sweep(head_dims=(*kernel_report.HEAD_DIMS, *kernel_report.PADDED_HEAD_DIMS))
        for kernel in PARTS[c.part]
    }
    for problem, row in kernel_exceptions.exceptions().items():
        assert problem[:5] in kernels and row.reason and row.figures, problem


def test_accepting_keeps_reasons(tmp_path):
    table = tmp_path / "table.csv"

    def accept(spills: dict[int, int]) -> dict[str, tuple[dict[str, float], str]]:
        report = {WHERE._replace(head_dim=d): {"forward_kernel": {**USED, "spills": n}} for d, n in spills.items()}
        kernel_exceptions.accept({"3.9.0": report}, table)
        return {problem.head_dim: tuple(row) for problem, row in kernel_exceptions.exceptions(table).items()}

    assert accept({64: 4}) == {"64": ({"3.9.0": 4}, "")}
    table.write_text(table.read_text().replace(",4,,", ",4,,few"))
    assert accept({64: 8, 128: 2}) == {"64": ({"3.9.0": 8}, "few"), "128": ({"3.9.0": 2}, "few")}
    table.write_text(table.read_text().replace("2,,few", "2,,others"))
    assert accept({128: 2, 256: 6}) == {"128": ({"3.9.0": 2}, "others"), "256": ({"3.9.0": 6}, "")}


@pytest.mark.slow
def test_an_interpreting_process_refuses_to_compile():
    process = subprocess.run(
        [sys.executable, "-m", "bench.compile_worker"],
        cwd=ROOT,
        env={**triton_versions.environment(VERSIONS[0]), "TRITON_INTERPRET": "1"},
        input='{"architecture": 90, "head_dim": 64, "dtype": "bfloat16"}\n',
        capture_output=True,
        text=True,
    )
    assert process.returncode != 0 and "TRITON_INTERPRET" in process.stderr


# ---------------------------------------------------------------------- other versions of Triton


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a pip that installs a package of two files; yields the list of pip's runs."""
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path))
    runs = []

    def install(version, folder):
        runs.append(version)
        (folder / "triton").mkdir(parents=True)
        (folder / f"triton-{version}.dist-info").mkdir()
        (folder / "triton" / "__init__.py").write_text("x = 1\n")
        record = "triton/__init__.py,sha256=0,6\n../../bin/proton,sha256=0,9\nRECORD,,\n"
        (folder / f"triton-{version}.dist-info" / "RECORD").write_text(record)

    monkeypatch.setattr(triton_versions, "_install", install)
    return runs


def test_a_version_is_fetched_once_however_many_ask(cache, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(triton_versions.site, ["0.0.1"] * 8)) == {tmp_path / "triton-0.0.1"}
    assert cache == ["0.0.1"]
    path = triton_versions.environment("0.0.1")["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(tmp_path / "triton-0.0.1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["triton-0.0.1", "triton-0.0.1.lock"]


def test_a_damaged_copy_is_fetched_again(cache):
    folder = triton_versions.site("0.0.1")
    (folder / "triton" / "__init__.py").write_text("x")
    assert not triton_versions.is_complete(folder)
    triton_versions.site("0.0.1")
    assert triton_versions.is_complete(folder) and len(cache) == 2


def test_an_interrupted_installation_leaves_nothing_behind(cache, monkeypatch, tmp_path):
    def fail(version, folder):
        folder.mkdir()
        raise triton_versions.Unavailable("no index")

    monkeypatch.setattr(triton_versions, "_install", fail)
    with pytest.raises(triton_versions.Unavailable, match="no index"):
        triton_versions.site("0.0.1")
    assert [p.name for p in tmp_path.iterdir()] == ["triton-0.0.1.lock"]
