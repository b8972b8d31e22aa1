"""Calls that take seconds, of every function of balance, plan, schedule and simulate in csrc, for test_interrupts.

python -m tests.long_calls NAME ... runs them one after the other. Each gets SIGINT shortly after its start. One line of
JSON reports its end: name, how, and seconds of CPU time after the signal. A call that ends before the signal, as on a
fast machine, runs again with a shorter delay.
"""

import json
import os
import signal
import sys
import threading
import time

import numpy as np

from interlace import _core
from interlace.schedule import StageGraph

RNG = np.random.default_rng(0)
MILLION = 10**6
MOMENTS = (0.15, 0.05, 0.015)  # s
LINK = (1e-3, 1e-3)
TP = np.array([1, 2, 4, 8])
CHOICES = [np.array([[a, b] for a in range(1, 7) for b in range(1, 7)], float)] * 8


def some(count):
    return RNG.random(count)


def every(nth, count):
    return np.arange(count) % nth == 0


def pipeline(microbatches, stages):
    return some((microbatches, stages)), some((microbatches, stages)), stages, 0.1


def searched():
    modules = [(degrees, f := some((len(degrees), 64)), 2 * f, some((6, 64))) for degrees in CHOICES]
    shares = [[-1] * 8] * 3, [[-1] * 2] * 3
    return modules, 2048, 2048, 1, 60.0, LINK, LINK, LINK, [1, 2, 4], [False, True], *shares


def forwards(actions):
    """One rank with this many forwards of one stage."""
    zero, rows = np.zeros(1, int), np.full((actions, 7), -1, np.int32)
    rows[:, :4] = 0
    nothing, starts = np.zeros(0, int), np.array([0, 1])
    nodes, lane, reductions = (zero, zero, zero, zero), (starts, zero), (zero, nothing, nothing)
    shards = nothing, zero, nothing
    return rows, np.array([0, actions]), zero, *nodes, *lane, *reductions, *shards, *[np.ones(actions)] * 4


def step(chunks):
    """Two modules of one stage each; a chunk of one is read by a chunk of the other."""
    links = [("a", "b")]
    graph = StageGraph.build({"a": [0], "b": [1]}, links, replicas=2)
    pairs = np.stack([np.arange(chunks // 2), np.arange(chunks // 2) + chunks // 2], axis=1)
    return graph.arrays, np.repeat([0, 2], chunks // 2), pairs


GPIPE, AUTOMATIC = ((kind, True, True, *[np.zeros(0)] * 3, 0) for kind in (0, 6))


def scheduled(chunks):
    arguments = step(chunks)
    nothing = [np.zeros(0)] * 2
    return *arguments, True, True, *_core.schedule_lists(*arguments, *GPIPE), *nothing


def in_order(chunks):
    """Every forward of a step of one stage after the other, then every backward."""
    arguments = step(chunks)
    jobs = np.arange(len(_core.schedule_jobs(*arguments, True)[0]), dtype=np.int32)
    return *arguments, np.concatenate([4 * jobs, 4 * jobs[::-1] + 1]), True, True, False


# Name -> (function, its argument factory). A function with two slow code paths has an entry for each.
CALLS = {
    "assign_lpt": (_core.assign_lpt, lambda: (some(8 * MILLION), MILLION, None)),
    "assign_even": (_core.assign_even, lambda: (some(8 * MILLION), MILLION, None)),
    "assign_lpt_greedy": (_core.assign_lpt_greedy, lambda: (some(8 * MILLION), MILLION, None)),
    "assign_contiguous": (_core.assign_contiguous, lambda: (some(8 * MILLION), 4 * MILLION, None)),
    "assign_exact": (_core.assign_exact, lambda: (some(60), 7, None, 2**62, np.inf)),
    "assign_exact, many bins": (_core.assign_exact, lambda: (some(10**5), 3 * 10**4, None, 2**62, np.inf)),
    "assign_rows": (_core.assign_rows, lambda: (some(MILLION), 2, MILLION // 2, 1, True)),
    "assign_random": (_core.assign_random, lambda: (some(2 * 10**7), MILLION, None, 1)),
    "lower_bound": (_core.lower_bound, lambda: (some(2 * 10**7), 3, None)),
    "post_balance_packed": (_core.post_balance_packed, lambda: (some(4 * MILLION), some(4 * MILLION), 10**5)),
    "post_balance_padded": (_core.post_balance_padded, lambda: (some(4 * MILLION), some(4 * MILLION), MILLION)),
    "post_balance_convolution": (_core.post_balance_convolution, lambda: (some(4 * MILLION), some(4 * MILLION), 10**5)),
    "nodewise_placement": (_core.nodewise_placement, lambda: (some((4096, 4096)), 8)),
    "nodewise_placement_of_items": (
        _core.nodewise_placement_of_items,
        lambda: (*RNG.integers(0, 4096, (2, 10**7)), some(10**7), 4096, 8),
    ),
    "nodewise_bound": (_core.nodewise_bound, lambda: (some((2048, 2048)), 8, 2**30)),
    "exchange_orders": (_core.exchange_orders, lambda: (*RNG.integers(0, MILLION, (2, 2 * 10**7)), MILLION)),
    "subset_sum": (_core.subset_sum, lambda: (some(4 * MILLION), 1e6, None)),
    "bottleneck_match": (_core.bottleneck_match, lambda: (some((4000, 4000)), np.full(4000, np.inf))),
    "assign_replicas": (_core.assign_replicas, lambda: (some(4 * MILLION), some(4 * MILLION), MILLION, True, False)),
    "assign_microbatches": (_core.assign_microbatches, lambda: (some(10**5), some(10**5), 10**4, False, False)),
    "deferral_costs": (_core.deferral_costs, lambda: ([some(100) for _ in range(5000)], some(5000))),
    "assign_ascending": (_core.assign_ascending, lambda: (some(4 * MILLION), MILLION, 100)),
    "reorder_microbatches": (_core.reorder_microbatches, lambda: (*pipeline(64, 16), 2**40)),
    "reorder_microbatches, printed": (_core.reorder_microbatches, lambda: (*pipeline(2000, 64), 1)),
    "pipeline_makespan": (_core.pipeline_makespan, lambda: (*pipeline(4000, 1000), np.arange(4000))),
    "schedule_jobs": (_core.schedule_jobs, lambda: (*step(4 * MILLION), True)),
    "schedule_lists": (_core.schedule_lists, lambda: (*step(MILLION), *AUTOMATIC)),
    "schedule_of_order": (_core.schedule_of_order, lambda: in_order(2 * MILLION)),
    "schedule_bound": (_core.schedule_bound, lambda: (*step(4 * MILLION), True, some(16 * MILLION))),
    "schedule_check": (_core.schedule_check, lambda: scheduled(2 * MILLION)),
    "partition": (_core.partition, lambda: (some(8 * MILLION), 4 * MILLION)),
    "backward_needs": (_core.backward_needs, lambda: (some(10**8) > 0.5, False)),
    "frozen_costs": (_core.frozen_costs, lambda: (*[some(10**7)] * 3, some(10**7) > 0.5, True, True)),
    "limited_partition": (
        _core.limited_partition,
        lambda: (some(10**5), 1.0 + 4 * every(7, 10**5), 4.0 + 996 * every(3, 10**4), some(10**4)),
    ),
    "pipeline_template": (_core.pipeline_template, lambda: (some((1600, 4)), TP, 2, 1000, 4)),
    "instantiate": (_core.instantiate, lambda: (np.arange(2, 8000), 1 + some(7998), 16384, 8000, 8100)),
    "split_batch": (_core.split_batch, lambda: (1 + some(MILLION), 10**9, False)),
    "split_batch, variance": (_core.split_batch, lambda: (1 + some(10**5), 10**9, True)),
    "orchestrate": (
        _core.orchestrate,
        lambda: (some((8, 4)), np.zeros(8, int), some((8, 5)), 3, TP, 2**24, 2**20, 1, 1e3, LINK, LINK),
    ),
    "search_configuration": (_core.search_configuration, searched),
    "simulate": (_core.simulate, lambda: forwards(6 * MILLION)),
}  # fmt: skip


def interrupted(name):
    """Runs one call and interrupts it. Returns how it ended and the CPU seconds after the signal."""
    function, arguments = CALLS[name]
    given = arguments()
    for moment in MOMENTS:
        how, seconds = interrupted_after(moment, function, given)
        if seconds is not None:
            break
    return {"name": name, "how": how, "seconds": seconds}


def interrupted_after(moment, function, given):
    at, over = [], threading.Event()

    def interrupt():
        if not over.wait(moment):
            at.append(time.process_time())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        try:
            function(*given)
            how = "returned"
        except KeyboardInterrupt:
            how = "KeyboardInterrupt"
        ended = time.process_time()
        over.set()
        thread.join()
    except KeyboardInterrupt:  # the signal came just after the call had returned
        thread.join()
        return "returned", None
    return how, ended - at[0] if at else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    for name in sys.argv[1:]:
        print(json.dumps(interrupted(name)), flush=True)
