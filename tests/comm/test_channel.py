"""The channel between processes: damaged or hostile messages, lost peers, sums and gathers in flight.

A damaged header or message is an error that names its sender. Nothing is executed or allocated.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.channels import process_group as channel_group
from interlace.comm.channels.base import Tag
from interlace.comm.channels.process_group import DTYPES, MAGIC, GroupChannel
from interlace.comm.channels.star import HEADER, LONGEST, MESSAGE
from interlace.comm.process.errors import CommError
from tests.comm.channel_local import ARRIVED, out_of_order
from tests.distributed.workers import shorten

DUE = Tag("a", 0, 0, 0, False)
GRADIENT = Tag("a", 0, 0, 0, True)
KINDS = "all_gather all_reduce reduce_scatter gather exchange send receive wait finish"
DIGEST = 0xABCDEF012345
DAMAGED = "rank 0: the header of a[0] chunk 0 from rank 1 is damaged"
NO_MESSAGE = "rank 0, loss: rank 1 sent something else than a message: its program differs"

# Header that rank 1 sends instead, and error of rank 0. Fields after the magic number: digest of the step, module,
# stage, chunk, other chunk, gradient, dtype, dimensions, shape, and last the rows of the whole.
HEADERS: list[tuple[list[int], str]] = [
    ([7], "rank 0: expected the header of a[0] chunk 0 from rank 1, got something else"),
    ([MESSAGE, 10], "rank 0: expected the header of a[0] chunk 0 from rank 1, got something else"),
    ([MAGIC, DIGEST, 2, 0, 0, 0, 0, 0, 1, 4], DAMAGED),
    ([MAGIC, DIGEST, -1, 0, 0, 0, 0, 0, 1, 4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, 77, 1, 4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, -1, 1, 4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, 0, 9, 4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, 0, -1, 4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, 0, 2, 4, -4], DAMAGED),
    ([MAGIC, DIGEST, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0, -1], DAMAGED),
    ([MAGIC, 2**48, 0, 0, 0, 0, 0, 0, 1, 4], DAMAGED),
    ([MAGIC, -1, 0, 0, 0, 0, 0, 0, 1, 4], DAMAGED),
    (
        [MAGIC, 1, 0, 0, 0, 0, 0, 0, 1, 4],
        "rank 0, RECV a[0] chunk 0: rank 1 has another step table (000000000001, here abcdef012345): use the same "
        "seed, config, data and data position on every rank",
    ),
    ([MAGIC, DIGEST, 1, 0, 0, 0, 0, 0, 1, 4], "rank 0 expected a[0] chunk 0 from rank 1 but received b[0] chunk 0"),
    (
        [MAGIC, DIGEST, 0, 0, 0, 5, 1, 0, 1, 4],
        "rank 0 expected a[0] chunk 0 from rank 1 but received gradient of a[0] chunk 0 for chunk 5",
    ),
    (
        [MAGIC, DIGEST, 0, 0, 0, 0, 0, 0, 1, 10**15],
        "rank 0: a[0] chunk 0 from rank 1 has shape [1000000000000000], too large for cpu",
    ),
    (
        [MAGIC, DIGEST, 0, 0, 0, 0, 0, 3, 3, 2**62, 2**62, 2**62],  # its product would overflow 64 bits
        f"rank 0: a[0] chunk 0 from rank 1 has shape {[2**62] * 3}, too large for cpu",
    ),
]


class Executed:
    """Its pickle creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def channel(timeout: float = 20.0) -> GroupChannel:
    made = GroupChannel(["a", "b"], timeout)
    made.begin(DIGEST)
    return made


def told(call: Any) -> str:
    try:
        return f"nothing: {call()}"
    except CommError as error:
        return str(error)


def padded(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([*numbers, *[0] * (HEADER - len(numbers))])


def gathered_apart(rank: int, hangs: bool) -> list[Any]:
    """As on GPUs: the host does not wait for a gather, and errors are reported at the end."""
    with mock.patch.multiple(channel_group, EDGES={"cpu": "gloo"}, SUMS={"cpu": "gloo"}):
        here = channel()
        here.add_groups([[0, 1, 2], [0, 2]])
    dist.barrier()
    if hangs:
        shorten(here, 1.0)
    if hangs and rank == 1:
        while True:  # until it is killed
            time.sleep(1)
    given = [torch.arange(6.0).view(2, 3) * rank, torch.ones(3, dtype=torch.bfloat16) * rank, torch.ones(0)]
    pending = [here.start_gather(each, [0, 1, 2], f"{i}") for i, each in enumerate(given)]
    if hangs:
        return [told(lambda: [each.wait() for each in pending])]
    some = here.start_gather(given[0].t(), [0, 2], "two").wait().tolist() if rank != 1 else []
    whole = [each.wait().tolist() for each in pending]
    here.finish()
    return [whole, some]


def test_a_gather_comes_in_one_piece(pool: Any) -> None:
    rows = torch.arange(6.0).view(2, 3)
    whole = [torch.stack([rows * i for i in range(3)]).tolist(), [[float(i)] * 3 for i in range(3)], [[]] * 3]
    two = torch.stack([rows.t() * 0, rows.t() * 2]).tolist()
    assert pool.returned(3, gathered_apart, False) == [[whole, two], [whole, []], [whole, two]]


def test_a_rank_that_is_missed_in_a_gather_is_named(pool: Any) -> None:
    first, _, last = pool.run(3, gathered_apart, True, stopped=[1])
    for kind, value, _ in (first, last):
        assert kind == "returned" and "GATHER 0: lost rank 1" in value[0], (kind, value)


def connected_twice(rank: int) -> str:
    here = channel()
    lanes = here.connect([(0, 1)])
    assert list(lanes) == ([(0, 1)] if rank < 2 else []) and here.connect([(0, 1)]) == lanes
    return told(lambda: here.connect([(0, 1), (1, 2)]))


def test_lanes_are_connected_once(pool: Any) -> None:
    """A second set of lanes would hang: the ranks outside would wait for groups that the ranks inside do not make."""
    said = pool.returned(3, connected_twice)
    wanted = "other lanes are connected already: pass all lanes in one call"
    assert said == [f"rank {rank}: {wanted}" for rank in range(3)]


# ---------------------------------------------------------------------- invalid headers, messages and gradients


def hostile_headers(rank: int) -> list[str]:
    if rank == 1:
        for numbers, _ in HEADERS:
            dist.send(padded(numbers), 0)
        return []
    here = channel()
    return [told(lambda: here.receive(1, DUE)) for _ in HEADERS]


def test_a_header_that_is_none_is_refused(pool: Any) -> None:
    said, _ = pool.returned(2, hostile_headers)
    assert said == [says for _, says in HEADERS]


def hostile_messages(rank: int, path: str) -> list[str]:
    executed = pickle.dumps(["loss", [Executed(path), ""]])
    texts = [
        executed,
        b'["loss",[[1,2],"',
        b'["loss",["1",""]]',
        b'["gradient norm",[1.0,""]]',
        b'["loss",[1.0,"0,1\\t1\\tabc\\ta sum of 3"]]',
        b'["loss",[1.0,"what is no sums"]]',
        b'["loss",[1.0,"0,7\\t1\\tabc\\ta sum"]]',
    ]
    messages = [([MESSAGE, len(text)], text) for text in texts]
    messages += [(head, b"") for head in ([MESSAGE, LONGEST + 1], [MESSAGE, 2**50], [MESSAGE, -5], [MAGIC, 4])]
    heard = []
    for header, raw in messages:
        here = channel()
        if rank == 0:
            heard.append(told(lambda here=here: here.exchange(1.0, "loss")))
            continue
        dist.send(padded(header), 0)
        if raw:
            dist.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0)
        heard.append(here._star._receive_value("loss", ["", [[1.0, ""]] * 2], 0, 20.0, 20.0)[0])
    return heard


def test_a_message_is_read_or_refused_and_never_executed(pool: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed"
        here, there = pool.returned(2, hostile_messages, str(path))
        assert not path.exists()
    assert [text.partition(" (")[0] for text in here] == [
        "rank 0, loss: rank 1 sent an unreadable message",
        "rank 0, loss: rank 1 sent an unreadable message",
        "rank 0, loss: rank 1 sent a message of another form: run the same version of the program on all ranks",
        "rank 0, loss: rank 1 is in gradient norm",
        "rank 0, loss: ranks 0,1 have different sums: rank 0 made no, the last of none; rank 1 made 1, the "
        "last of a sum of 3",
        *["rank 0, loss: rank 1 sent an unreadable list of its sums"] * 2,
        *[NO_MESSAGE] * 4,
    ]
    # Rank 0 reports to the others. It forwards the sums of the ranks, and every rank compares only those.
    assert there == ["" if "sum" in text else text for text in here]


def hostile_gradients(rank: int) -> list[str]:
    here = channel()
    if rank == 1:
        here.receive(0, DUE)
        for numbers in ([0, 1, 3], [0, 2, 1, 2], [3, 1, 2]):
            dist.send(padded([MAGIC, DIGEST, 0, 0, 0, 0, 1, *numbers]), 0)
        here.send(torch.ones(2), 0, GRADIENT)
        here.finish()
        return []
    here.send(torch.ones(2), 1, DUE)
    said = [told(lambda: here.receive(1, GRADIENT)) for _ in range(4)]
    here.finish()
    return said


def test_a_gradient_has_the_shape_and_dtype_of_what_was_sent(pool: Any) -> None:
    said, _ = pool.returned(2, hostile_gradients)
    assert said == [
        f"rank 0: gradient of a[0] chunk 0 from rank 1 is {what}, but torch.float32 [2] was sent"
        for what in ("torch.float32 [3]", "torch.float32 [1, 2]", "torch.float64 [2]")
    ] + ["nothing: tensor([1., 1.])"]


def any_header(rank: int) -> None:
    here = channel()
    number = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)

    @settings(max_examples=100, derandomize=True, database=None, deadline=None)
    @given(st.lists(number, min_size=HEADER - 1, max_size=HEADER - 1), st.booleans())
    def test(numbers: list[int], right_until_shape: bool) -> None:
        if right_until_shape:
            numbers[:6] = [DIGEST, 0, 0, 0, 0, 0]
        sent = iter([torch.tensor([MAGIC, *numbers])])

        def come(tensor: torch.Tensor, *_: Any) -> None:
            if (header := next(sent, None)) is not None:
                tensor.copy_(header)

        here._receive_into = come  # type: ignore[method-assign]
        try:
            result = here.receive(1, DUE)
        except CommError:
            return
        *_, dtype, dims = numbers[:8]
        assert result.dtype is DTYPES[dtype] and list(result.shape) == numbers[8 : 8 + dims]

    test()


def test_any_header_is_a_tensor_or_an_error(pool: Any) -> None:
    pool.returned(1, any_header)


# ---------------------------------------------------------------------- successful steps


def step(rank: int) -> list[Any]:
    """A ring of tensors of every dtype and unusual shapes, with several sums and gathers in flight; twice."""
    here = channel()
    here.add_groups([[0, 1, 2], [0, 2], [1]])
    left, right, result = (rank - 1) % 3, (rank + 1) % 3, []
    for number in range(2):
        here.begin(DIGEST + number)
        gathered = here.start_all_gather(torch.tensor([rank, number], dtype=torch.float64), "times")
        sums = [torch.full((50 + i,), float(rank + i)) for i in range(6)]
        pending = [here.start_all_reduce(total, [0, 1, 2], f"sum {i}") for i, total in enumerate(sums)]
        rows = torch.arange(6.0).view(3, 2) * (rank + 1)
        scattered = here.start_reduce_scatter(rows, [0, 1, 2], "rows")
        brought = here.start_gather(torch.tensor([rank, 7 + number]), [0, 1, 2], "brought")
        alone = torch.tensor([float(rank)])
        here.start_all_reduce(alone, [rank], "alone").wait()
        if rank != 1:
            pair = torch.tensor([float(rank + 1)], dtype=torch.bfloat16)
            here.start_all_reduce(pair, [0, 2], "pair").wait()
            assert pair.item() == 4.0
        for i, dtype in enumerate(DTYPES):
            for shape in ((), (0, 3), (2, rank + 1)):
                here.send((torch.ones(shape) * rank).to(dtype), right, Tag("b", 1, i, len(shape), False))
        for i, dtype in enumerate(DTYPES):
            for shape in ((), (0, 3), (2, left + 1)):
                got = here.receive(left, Tag("b", 1, i, len(shape), False))
                assert (
                    got.dtype is dtype and got.shape == shape and torch.equal(got, (torch.ones(shape) * left).to(dtype))
                )
        here.finish()
        for work in pending:
            work.wait()
            work.wait()  # a second call does nothing
        assert brought.wait().tolist() == [[i, 7 + number] for i in range(3)]
        assert scattered.wait().tolist() == [12.0 * rank, 12.0 * rank + 6.0] and scattered.wait() is scattered.wait()
        assert [total.unique().tolist() for total in sums] == [[3.0 + 3 * i] for i in range(6)]
        nothing = here.start_all_gather(torch.zeros(0, dtype=torch.float64), "end", compare_sums=True).wait()
        result.append([gathered.wait().tolist(), list(nothing.shape), here.exchange({"rank": rank}, "values")])
        assert alone.item() == rank and gathered.wait() is gathered.wait()
    events = here.recorder.events()
    assert {event["kind"] for event in events} == set(KINDS.split())
    assert all(event["state"] == "done" for event in events)
    return [here.collectives, *result]


def test_a_step_between_processes(pool: Any) -> None:
    for count, *steps in pool.returned(3, step):
        assert count == 6  # two gathers and an exchange in each of two steps
        for number, (times, nothing, values) in enumerate(steps):
            assert times == [[rank, number] for rank in range(3)] and nothing == [3, 0]
            assert values == [{"rank": rank} for rank in range(3)]


def parts(rank: int) -> Any:
    return out_of_order(channel())


def test_what_comes_before_it_is_due_is_kept(pool: Any) -> None:
    assert pool.returned(2, parts)[1] == ARRIVED


def returning(rank: int) -> list[bool]:
    """Rank 0 sends two activations and gets the gradient of the second. Returns the data it still holds, then and
    later.
    """
    here = channel()
    tags = [Tag("a", 0, chunk, chunk, False) for chunk in range(2)]
    if rank == 1:
        for tag in tags:
            here.receive(0, tag)
        here.send(torch.ones(3), 0, tags[1]._replace(grad=True))
        here.finish()
        return []
    arrays = [np.ones(3, np.float32) for _ in tags]
    alive = [weakref.ref(array) for array in arrays]
    for tag in tags:
        here.send(torch.from_numpy(arrays.pop(0)), 1, tag)
    here.receive(1, tags[1]._replace(grad=True))
    before = [one() is not None for one in alive]
    here.finish()
    return before + [one() is not None for one in alive]


def test_what_was_sent_is_let_go_when_its_gradient_is_back(pool: Any) -> None:
    assert pool.returned(2, returning)[0] == [True, False, False, False]


# ---------------------------------------------------------------------- ranks that differ


def sums(rank: int, keys: list[str], how: str) -> str:
    """Sums with different names, which gloo cannot distinguish; then the ranks continue communicating."""
    here = channel()
    ranks = [0, 1, 2]
    here.add_groups([ranks])
    for key in keys[rank].split():
        total = torch.full((3,), float(rank))
        here.start_all_reduce(total, ranks, key).wait()
        assert total.tolist() == [sum(ranks)] * 3
    if how == "gather":
        numbers = torch.tensor([float(rank)], dtype=torch.float64)
        return told(lambda: here.start_all_gather(numbers, "loss", compare_sums=True).wait().tolist())
    return told(lambda: here.exchange(rank, "loss"))


@pytest.mark.parametrize("how", ["gather", "exchange"])
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["a b c", "a b c", "a b c"], "nothing: "),
        (["a b c", "a c b", "a b c"], "rank 0 made 3, the last of c, 3 float32; rank 1 made 3, the last of b, 3 "),
        (["a b", "a b", "c b"], "rank 0 made 2, the last of b, 3 float32; rank 2 made 2, the last of b, 3 f"),
    ],
)
def test_mismatched_sums_are_reported_at_the_next_exchange(pool: Any, keys: list[str], says: str, how: str) -> None:
    for rank, text in enumerate(pool.returned(3, sums, keys, how)):
        assert says in text and ("nothing" in says) != ("ranks 0,1,2 have different sums" in text), (rank, text)


def different(rank: int) -> list[str]:
    lines = []
    for way in ("digest", "what", "count"):
        here = channel()
        if way == "digest":
            here.begin(DIGEST + rank)
        numbers = torch.zeros(2 + rank if way == "count" else 2, dtype=torch.float64)
        what = f"the {'norm' if rank else 'loss'}" if way == "what" else "the loss"
        lines.append(told(lambda here=here, n=numbers, w=what: here.start_all_gather(n, w).wait()))
    return lines


def test_a_gather_compares_what_it_is_about(pool: Any) -> None:
    digest, what, count = pool.returned(2, different)[0]
    assert digest.startswith("rank 0, the loss: rank 1 has another step table (abcdef012346, here abcdef012345)")
    assert what == "rank 0 gathers 2 numbers in the loss, but rank 1 gathers 2 or is in another part of its program"
    assert count == "rank 0 gathers 2 numbers in the loss, but rank 1 gathers 3 or is in another part of its program"


def misuse(rank: int) -> list[str]:
    here = channel()
    said = [
        told(lambda: here.start_all_reduce(torch.ones(1), [0, 1], "x")),
        told(lambda: here.send(torch.ones([1] * 9), 0, DUE)),
        told(lambda: here.send(torch.ones(1, dtype=torch.complex64), 0, DUE)),
    ]
    with pytest.raises(ValueError, match=r"takes float64 \[n\], got torch.float32 \[1\]"):
        here.start_all_gather(torch.ones(1), "x")
    return said


def test_what_cannot_be_sent_is_refused(pool: Any) -> None:
    assert pool.returned(1, misuse)[0] == [
        "rank 0, REDUCE x: no group of ranks [0, 1]: pass it to add_groups first",
        "rank 0: a[0] chunk 0 has 9 dimensions, at most 8 are supported",
        "rank 0: a[0] chunk 0 is torch.complex64, which is not supported",
    ]


# ---------------------------------------------------------------------- lost ranks


def lose(rank: int, call: str, how: str, victim: int) -> tuple[str, float]:
    here = channel(60.0)
    here.add_groups([[0, 1, 2]])
    here.exchange(0, "a good start")
    dist.barrier()
    shorten(here, 2.0)
    if rank == victim:
        if how == "leaves":
            here.leave("it has no more data")
            while True:  # until it is killed
                time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    begin = time.monotonic()
    if call == "gather":
        said = told(lambda: here.start_all_gather(torch.zeros(1, dtype=torch.float64), "the loss").wait())
    elif call == "exchange":
        said = told(lambda: here.exchange(1, "the loss"))
    elif call == "reduce":
        said = told(lambda: here.start_all_reduce(torch.zeros(5), [0, 1, 2], "the loss").wait())
    elif rank == (victim + 1) % 3:
        said = told(lambda: here.receive(victim, DUE))
    else:
        said = "the loss: nobody was lost"
    return said, time.monotonic() - begin


@pytest.mark.parametrize(
    ("call", "how", "victim"),
    [
        ("gather", "dies", 1),
        ("gather", "hangs", 0),
        ("gather", "leaves", 1),
        ("exchange", "hangs", 1),
        ("exchange", "dies", 0),
        ("reduce", "hangs", 2),
        ("receive", "dies", 1),
    ],
)
def test_a_lost_rank_is_named_within_the_timeout(pool: Any, call: str, how: str, victim: int) -> None:
    outcomes = pool.run(3, lose, call, how, victim, stopped=[victim])
    for rank in {0, 1, 2} - {victim}:
        kind, (said, seconds), _ = outcomes[rank]
        assert kind == "returned" and seconds < 50, (rank, kind, said, seconds)  # less than the previous wait
        if "nobody" in said:
            continue
        assert f"lost rank {victim} (" in said, (rank, said)
        assert ("RECV" if call == "receive" else "the loss") in said
        assert {"hangs": "no answer within 2 s", "leaves": "it aborted: it has no more data"}.get(how, "") in said, said
