"""External data is never unpickled, since a pickle may run arbitrary code of its author. Checked on the syntax tree.

Sockets opened by Interlace, shared memory and input files use JSON, fixed headers or numbers. torch.distributed's own
object collectives, DataLoader, Ray and child processes are within the job, whose members trust each other.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.layering import imported

ROOT = Path(__file__).parent.parent

# Modules that unpickle or execute their input, and names that do so on any object.
MODULES = {
    "pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "yaml", "copyreg",
    "multiprocessing", "torch.multiprocessing", "torch.package", "torch.hub", "torch.jit.load",
    "concurrent.futures.ProcessPoolExecutor", "torch.distributed.rpc",
}  # fmt: skip
NAMES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "read_pickle", "recv_pyobj", "Unpickler", "FileSystemReader", "eval", "exec",
}  # fmt: skip
CALLED = {"load", "eval", "exec"}  # only as attributes of these modules
GIVEN = {"weights_only", "allow_pickle", "trust_remote_code"}

WITHIN_THE_JOB = "among the processes of one job"
ALLOWED = {
    ("bench/dispatch.py", "broadcast_object_list"): "between processes that it has started",
    ("bench/frozen_pipeline.py", "broadcast_object_list"): WITHIN_THE_JOB,
    ("bench/frozen_pipeline.py", "torch.multiprocessing"): "starts processes",
    ("bench/simulated_slots.py", "broadcast_object_list"): WITHIN_THE_JOB,
    ("bench/simulated_slots.py", "torch.multiprocessing"): "starts processes",
    ("bench/entrain.py", "torch.multiprocessing"): "starts processes",
    ("bench/dispatch.py", "torch.multiprocessing"): "starts processes",
    ("bench/context_parallel.py", "torch.multiprocessing"): "starts processes",
    ("bench/simulated_step.py", "torch.multiprocessing"): "starts processes",
    ("bench/overlap.py", "torch.multiprocessing"): "starts processes",
    ("bench/collective_time.py", "torch.multiprocessing"): "starts processes",
    ("bench/overlapped_step.py", "torch.multiprocessing"): "starts processes",
    ("python/interlace/data/workers/pool.py", "multiprocessing"): "starts processes",
    (
        "python/interlace/data/workers/pool.py",
        "multiprocessing.connection.Connection",
    ): "to processes that it has started",
    ("python/interlace/data/workers/pool.py", "multiprocessing.connection.wait"): "to processes that it has started",
    ("python/interlace/data/workers/pool.py", "pickle"): "of what it sends",
    ("python/interlace/data/workers/process.py", "multiprocessing"): "names its parent",
    ("python/interlace/data/workers/process.py", "multiprocessing.connection.Connection"): "to who has started it",
    ("python/interlace/data/workers/process.py", "multiprocessing.connection.wait"): "reads nothing",
    ("python/interlace/data/workers/process.py", "pickle"): "of who has started it",
    ("python/interlace/data/chats/files/index_pool.py", "pickle"): "of what it sends",
    ("python/interlace/data/chats/files/index_worker.py", "pickle"): "of who has started it",
    ("python/interlace/data/workers/tasks.py", "pickle"): "of who has started it",
    ("python/interlace/data/workers/tasks.py", "Unpickler"): "of who has started it",
    ("python/interlace/data/workers/ray_tasks.py", "pickle"): "among the tasks of one job",
    ("python/interlace/estimate/traced.py", "torch.multiprocessing.reductions.StorageWeakRef"): "reads nothing",
    ("python/interlace/train/step_overhead.py", "pickle"): "of what it has pickled itself, to time that",
    ("bench/kernel_times.py", "multiprocessing"): "starts processes",
    ("bench/kernel_times.py", "concurrent.futures.ProcessPoolExecutor"): "starts processes",
    ("bench/scheduling_peers.py", "multiprocessing"): "starts processes",
    ("bench/scheduling_peers.py", "concurrent.futures.ProcessPoolExecutor"): "starts processes",
}


def unpicklers(source: str) -> set[str]:
    """Calls and imports in a source that may unpickle or execute data."""
    result = {name for name in imported(source, "module") for module in MODULES if f"{name}.".startswith(f"{module}.")}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        name = ast.unparse(node.func) if last in CALLED else last
        given = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg in GIVEN}
        if last in NAMES and not (last in ("eval", "exec") and "." in name):  # module.eval() is unrelated
            result.add(last)
        if name == "torch.load" and given.get("weights_only") != "True":
            result.add("torch.load")
        if name in ("torch.jit.load", "torch.hub.load"):
            result.add(name)
        if given.get("allow_pickle", "False") != "False":
            result.add("allow_pickle")
        if given.get("trust_remote_code", "False") != "False":
            result.add("trust_remote_code")
    return result


def test_nothing_from_elsewhere_is_unpickled() -> None:
    result = {
        (path.relative_to(ROOT).as_posix(), what)
        for folder in ("python/interlace", "kernels", "bench")
        for path in (ROOT / folder).rglob("*.py")
        for what in unpicklers(path.read_text())
    }
    assert result - ALLOWED.keys() == set(), "unpickles: read JSON, numbers or safetensors instead"
    assert ALLOWED.keys() - result == set(), "is not needed any more: take it off the list"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f():\n    import pickle", {"pickle"}),
        ("from pickle import loads", {"pickle.loads"}),
        ("import multiprocessing.connection as c", {"multiprocessing.connection"}),
        ("from concurrent.futures import ProcessPoolExecutor, wait", {"concurrent.futures.ProcessPoolExecutor"}),
        ("import torch.multiprocessing as mp", {"torch.multiprocessing"}),
        ("import pickled_cucumbers, multiprocess", set()),
        ("torch.load(path)", {"torch.load"}),
        ("torch.load(path, weights_only=False)", {"torch.load"}),
        ("torch.load(path, weights_only=True)", set()),
        ("json.loads(text), module.load(path), mllm.eval()", set()),
        ("np.load(path, allow_pickle=True)", {"allow_pickle"}),
        ("np.load(path, allow_pickle=False)", set()),
        ("eval(text)", {"eval"}),
        ("dist.all_gather_object(found, mine)", {"all_gather_object"}),
        ("dcp.FileSystemReader(path)", {"FileSystemReader"}),
        ("AutoModel.from_pretrained(path, trust_remote_code=trusted)", {"trust_remote_code"}),
    ],
)
def test_the_search_finds(source: str, what: set[str]) -> None:
    assert unpicklers(source) == what
