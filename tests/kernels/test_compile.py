"""The static gate: kernels compile for GPUs that are not here, use their tensor cores, and spill nothing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from bench import kernel_report, triton_versions
from bench.compile_worker import Configuration
from bench.triton_versions import ROOT, VERSIONS
from tests.sampling import sample

PARTS = {
    "attention": kernel_report.DOTS,
    "gluon": (kernel_report.GLUON,),
    "plan": (
        "summary_kernel",
        "classify_kernel",
        "decide_kernel",
        "list_kernel q-major",
        "list_kernel k-major",
        "documents_kernel of queries",
        "documents_kernel of keys",
    ),
    "ranks": ("reduce_ranks_kernel", "copy_kernel"),
}
USED = dict(registers=100, shared=1000, spills=0, wgmma=8, mma=0, tcgen=0, tma=0)


def check(version: str, configurations: list[Configuration]) -> None:
    """Raises Unavailable when this Triton cannot be had."""
    report = kernel_report.compile_all(configurations, version)
    for configuration, kernels in report.items():
        expected = set(PARTS[configuration.part])
        if configuration.dtype == "float32" or configuration.head_dim > 128 or configuration.architecture != 100:
            expected.discard("key_gradient_kernel fused")
        assert expected <= set(kernels), configuration
    assert not kernel_report.problems(report)


@pytest.mark.parametrize("version", [VERSIONS[0], *(pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS[1:])])
def test_hopper(version):
    """The head size that most models have; the others are slow."""
    try:
        check(version, [Configuration(90, 128, "bfloat16")])
    except triton_versions.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_gluon_on_hopper():
    try:
        check(VERSIONS[0], [Configuration(90, 128, "bfloat16")._replace(part="gluon")])
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
    with ThreadPoolExecutor() as pool:  # a process each
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


def test_problems_are_found():
    where = Configuration(90, 128, "bfloat16")
    assert not kernel_report.problems({where: {"forward_kernel": USED}})
    for change, word in (
        ({"spills": 4}, "spills"),
        ({"shared": 232_449}, "more than 232448 bytes of shared memory"),
        ({"wgmma": 0}, "no wgmma"),
    ):
        (problem,) = kernel_report.problems({where: {"forward_kernel": {**USED, **change}}})
        assert problem.startswith(word)
    for change, word in (({"wgmma": 0, "tma": 2}, "no wgmma"), ({}, "no UTMALDG")):
        (problem,) = kernel_report.problems({where: {"gluon_forward_kernel": {**USED, **change}}})
        assert problem.startswith(word)
    most = kernel_report.SPILLS_OF_DKDV[128]
    assert not kernel_report.problems({where: {"key_gradient_kernel": {**USED, "spills": most}}})
    (problem,) = kernel_report.problems({where: {"key_gradient_kernel": {**USED, "spills": most + 1}}})
    assert problem.startswith("spills")
    assert not kernel_report.problems({where: {"sum_kernel": {**USED, "wgmma": 0}}})
    assert not kernel_report.problems({where._replace(dtype="float32"): {"forward_kernel": {**USED, "wgmma": 0}}})


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
    """An empty cache, and a pip that installs a package of two files; the list of its runs."""
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
