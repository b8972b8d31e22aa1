# The extension module that setup.py builds from csrc/. Arguments are checked there (ValueError).
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def assign_lpt(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_even(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_lpt_greedy(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_contiguous(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_ring(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_zigzag(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]: ...
def assign_random(weights: NDArray[np.generic], bins: int, capacity: int | None, seed: int) -> NDArray[np.int32]: ...
def assign_exact(
    weights: NDArray[np.generic], bins: int, capacity: int | None, nodes: int, seconds: float
) -> tuple[NDArray[np.int32], float, float, bool]: ...
def assign_rows(
    weights: NDArray[np.generic], rows: int, bins: int, capacity: int, refined: bool
) -> NDArray[np.int32]: ...
def lower_bound(weights: NDArray[np.generic], bins: int, capacity: int | None) -> float: ...
def post_balance_packed(
    lengths: NDArray[np.generic], attention: NDArray[np.generic], bins: int
) -> NDArray[np.int32]: ...
def post_balance_padded(
    lengths: NDArray[np.generic], attention: NDArray[np.generic], bins: int
) -> NDArray[np.int32]: ...
def post_balance_convolution(
    lengths: NDArray[np.generic], attention: NDArray[np.generic], bins: int
) -> NDArray[np.int32]: ...
def nodewise_placement(volume: NDArray[np.generic], ranks_per_node: int) -> NDArray[np.int32]: ...
def nodewise_placement_of_items(
    source: NDArray[np.generic],
    destination: NDArray[np.generic],
    sizes: NDArray[np.generic],
    ranks: int,
    ranks_per_node: int,
) -> NDArray[np.int32]: ...
def nodewise_bound(volume: NDArray[np.generic], ranks_per_node: int, iterations: int) -> float: ...
def exchange_orders(
    source: NDArray[np.generic], destination: NDArray[np.generic], ranks: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def subset_sum(weights: NDArray[np.generic], target: float, resolution: float | None) -> NDArray[np.int32]: ...
def bottleneck_match(cost: NDArray[np.generic], alone: NDArray[np.generic]) -> tuple[float, NDArray[np.int32]]: ...
def assign_replicas(
    encoder_cost: NDArray[np.generic],
    llm_cost: NDArray[np.generic],
    replicas: int,
    equal_counts: bool,
    as_printed: bool,
) -> NDArray[np.int32]: ...
def assign_microbatches(
    encoder_cost: NDArray[np.generic], llm_cost: NDArray[np.generic], microbatches: int, shrink: bool, as_printed: bool
) -> dict[str, Any]: ...
def deferral_costs(overloaded: list[NDArray[np.generic]], underloaded: NDArray[np.generic]) -> NDArray[np.float64]: ...
def assign_ascending(costs: NDArray[np.generic], groups: int, capacity: int) -> NDArray[np.int32]: ...
def reorder_microbatches(
    forward: NDArray[np.generic], backward: NDArray[np.generic], ranks: int, transfer: float, evaluations: int
) -> dict[str, Any]: ...
def pipeline_makespan(
    forward: NDArray[np.generic], backward: NDArray[np.generic], ranks: int, transfer: float, order: NDArray[np.generic]
) -> float: ...
def simulate(
    rows: NDArray[np.generic],
    first: NDArray[np.generic],
    chunk_pipeline: NDArray[np.generic],
    node_pipeline: NDArray[np.generic],
    node_stage: NDArray[np.generic],
    node_lane: NDArray[np.generic],
    pipeline_module: NDArray[np.generic],
    lane_first: NDArray[np.generic],
    lane_rank: NDArray[np.generic],
    reduction_first: NDArray[np.generic],
    reduction_rank: NDArray[np.generic],
    reduction_tied: NDArray[np.generic],
    shard_by_layer: NDArray[np.generic],
    shard_member_first: NDArray[np.generic],
    shard_member: NDArray[np.generic],
    seconds: NDArray[np.generic],
    transfer: NDArray[np.generic],
    memory: NDArray[np.generic],
    scratch: NDArray[np.generic],
) -> dict[str, Any]: ...
def schedule_jobs(
    graph: tuple[NDArray[np.int32], ...],
    chunk_pipeline: NDArray[np.generic],
    links: NDArray[np.generic],
    backward: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]: ...
def schedule_lists(
    graph: tuple[NDArray[np.int32], ...],
    chunk_pipeline: NDArray[np.generic],
    links: NDArray[np.generic],
    generator: int,
    backward: bool,
    reduce_grad: bool,
    seconds: NDArray[np.generic],
    activation_bytes: NDArray[np.generic],
    memory_limit: NDArray[np.generic],
    in_flight: int,
    dispatch: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
def schedule_of_order(
    graph: tuple[NDArray[np.int32], ...],
    chunk_pipeline: NDArray[np.generic],
    links: NDArray[np.generic],
    order: NDArray[np.generic],
    backward: bool,
    reduce_grad: bool,
    dispatch: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int64]] | tuple[int, int, int]: ...
def schedule_bound(
    graph: tuple[NDArray[np.int32], ...],
    chunk_pipeline: NDArray[np.generic],
    links: NDArray[np.generic],
    backward: bool,
    seconds: NDArray[np.generic],
) -> float: ...
def schedule_check(
    graph: tuple[NDArray[np.int32], ...],
    chunk_pipeline: NDArray[np.generic],
    links: NDArray[np.generic],
    backward: bool,
    reduce_grad: bool,
    rows: NDArray[np.int32],
    first: NDArray[np.generic],
    activation_bytes: NDArray[np.generic],
    memory_limit: NDArray[np.generic],
    dispatch: bool = False,
) -> dict[str, Any]: ...
def partition(costs: NDArray[np.generic], stages: int) -> NDArray[np.int32]: ...
def backward_needs(
    frozen: NDArray[np.generic], trainable_before: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]: ...
def frozen_costs(
    forward: NDArray[np.generic],
    input_grad: NDArray[np.generic],
    weight_grad: NDArray[np.generic],
    frozen: NDArray[np.generic],
    trainable_before: bool,
    recompute: bool,
) -> NDArray[np.float64]: ...
def pipeline_template(
    costs: NDArray[np.generic], widths: NDArray[np.generic], nodes: int, gpus_per_node: int, microbatches_per_stage: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], float]: ...
def instantiate(
    node_counts: NDArray[np.generic], times: NDArray[np.generic], nodes: int, pipelines: int, microbatches: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], float]: ...
def split_batch(times: NDArray[np.generic], microbatches: int, variance: bool) -> NDArray[np.int64]: ...
def limited_partition(
    costs: NDArray[np.generic],
    memory: NDArray[np.generic],
    memory_limits: NDArray[np.generic],
    speeds: NDArray[np.generic],
) -> NDArray[np.int32]: ...
def orchestrate(
    forward: NDArray[np.generic],
    layers: NDArray[np.generic],
    bytes: NDArray[np.generic],
    backbone: int,
    tp: NDArray[np.generic],
    gpus: int,
    batch: int,
    vpp: int,
    gpu_memory: float,
    stage_link: tuple[float, float],
    data_link: tuple[float, float],
) -> tuple[float, NDArray[np.int64]]: ...
def search_configuration(
    modules: list[tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]],
    gpus: int,
    batch: int,
    microbatch: int,
    gpu_memory: float,
    stage_link: tuple[float, float],
    tensor_link: tuple[float, float],
    data_link: tuple[float, float],
    dp: list[int],
    recompute: list[bool],
    parallel: list[list[int]],
    colocated: list[list[int]],
) -> tuple[float, int, bool, list[tuple[int, int, int, bool, list[NDArray[np.int32]], float]]]: ...
def attention_isa() -> str: ...
def attention_block_lists(
    queries: list[NDArray[np.generic]], keys: list[NDArray[np.generic]], sinks: int, block: int, threads: int
) -> tuple[NDArray[np.int32], ...]: ...
def attention_forward(
    q: NDArray[np.generic],
    k: NDArray[np.generic],
    v: NDArray[np.generic],
    mask: list[NDArray[np.generic]],
    block: int,
    sinks: int,
    scale: float,
    softcap: float,
    threads: int,
    out: NDArray[np.generic],
    lse: NDArray[np.generic],
) -> None: ...
def attention_backward(
    dout: NDArray[np.generic],
    dlse: NDArray[np.generic] | None,
    q: NDArray[np.generic],
    k: NDArray[np.generic],
    v: NDArray[np.generic],
    out: NDArray[np.generic],
    lse: NDArray[np.generic],
    mask: list[NDArray[np.generic]],
    block: int,
    sinks: int,
    scale: float,
    softcap: float,
    threads: int,
    dq: NDArray[np.generic],
    dk: NDArray[np.generic],
    dv: NDArray[np.generic],
) -> None: ...

class Exchange:
    """One rank's end of batches of copies through shared memory (csrc/comm/exchange.h)."""

    SLOTS: int
    REGIONS: int
    DONE: int
    WAITING: int
    STOPPED: int
    HEADER: int
    MAP: int
    DAMAGED: int
    OPEN: int
    CLOSED: int
    FAILED: int
    measures: bool
    spins: int
    def __init__(self, memory: NDArray[np.uint8], rank: int, world: int, slot_bytes: int) -> None: ...
    @staticmethod
    def size(world: int, slot_bytes: int) -> int: ...
    def run(
        self,
        sequence: int,
        headers: Sequence[bytes],
        expected: Sequence[bytes],
        outgoing: Sequence[tuple[int, int, int]],
        incoming: Sequence[tuple[int, int, int]],
        before: Callable[[str], None] | None,
        seconds: float,
    ) -> int: ...
    def advance(self, seconds: float) -> int: ...
    def wait(self, peer: int, count: int, seconds: float) -> int: ...
    def signal(self, peer: int) -> None: ...
    def lacking(self) -> list[int]: ...
    @property
    def moves(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def peer(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def waited(self) -> int: ...
    def state(self, rank: int) -> int: ...
    def leave(self, state: int, reason: bytes) -> None: ...
    def reason(self, rank: int) -> bytes: ...
    def header_from(self, peer: int) -> bytes: ...
    def add_region(self, number: int, address: int, bytes: int, handle: bytes) -> None: ...
    def region_of(self, rank: int, number: int) -> tuple[int, bytes]: ...
    def map_region(self, rank: int, number: int, address: int, bytes: int) -> None: ...
    def use_device(
        self,
        functions: Sequence[int],
        stream: int,
        slot_bytes: int,
        windows: Sequence[int],
        ready: Sequence[int],
        read: Sequence[int],
    ) -> None: ...
    def readers(self) -> list[tuple[int, int]]: ...

def fingerprint(data: NDArray[np.generic], seed: int = 0) -> int: ...
