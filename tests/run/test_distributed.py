"""What a damaged or hostile rank sends into the pipeline: an error that names it; nothing is executed or allocated."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.run import PipelineError
from interlace.run.channel import Tag
from interlace.run.distributed import _DTYPES, _HEADER, _LONGEST, _MAGIC, _MESSAGE, DistributedChannel

DUE = Tag("a", 0, 0, False)
GRADIENT = Tag("a", 0, 0, True)
DAMAGED = "rank 0: the header from rank 1 where a[0] microbatch 0 was due is damaged"
NO_MESSAGE = "rank 0, loss: what rank 1 sent is no message: its program differs"

# What rank 1 sends instead of a header, and what rank 0 says of it.
HEADERS: list[tuple[list[int], str]] = [
    ([7], "rank 0: no header from rank 1 where a[0] microbatch 0 was due"),
    ([_MESSAGE, 10], "rank 0: no header from rank 1 where a[0] microbatch 0 was due"),
    ([_MAGIC, 2, 0, 0, 0, 0, 1, 4], DAMAGED),
    ([_MAGIC, -1, 0, 0, 0, 0, 1, 4], DAMAGED),
    ([_MAGIC, 0, 0, 0, 0, 77, 1, 4], DAMAGED),
    ([_MAGIC, 0, 0, 0, 0, -1, 1, 4], DAMAGED),
    ([_MAGIC, 0, 0, 0, 0, 0, 9, 4], DAMAGED),
    ([_MAGIC, 0, 0, 0, 0, 0, -1, 4], DAMAGED),
    ([_MAGIC, 0, 0, 0, 0, 0, 2, 4, -4], DAMAGED),
    ([_MAGIC, 1, 0, 0, 0, 0, 1, 4], "rank 0 expected a[0] microbatch 0 from rank 1 but received b[0] microbatch 0"),
    (
        [_MAGIC, 0, 0, 0, 0, 0, 1, 10**15],
        "rank 0: a[0] microbatch 0 from rank 1 would have shape [1000000000000000], more than fits on cpu",
    ),
    (
        [_MAGIC, 0, 0, 0, 0, 3, 3, 2**62, 2**62, 2**62],  # its product would not fit a number of 64 bits
        f"rank 0: a[0] microbatch 0 from rank 1 would have shape {[2**62] * 3}, more than fits on cpu",
    ),
]


class Executed:
    """Its pickle leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def channel() -> DistributedChannel:
    return DistributedChannel(["a", "b"], 20.0)


def told(call: Any) -> str:
    try:
        return f"nothing: {call()}"
    except PipelineError as error:
        return str(error)


def padded(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([*numbers, *[0] * (_HEADER - len(numbers))])


def hostile_headers(rank: int) -> list[str]:
    if rank == 1:
        for numbers, _ in HEADERS:
            dist.send(padded(numbers), 0)
        return []
    return [told(lambda: channel().receive(1, DUE)) for _ in HEADERS]


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
    messages = [([_MESSAGE, len(text)], text) for text in texts]
    messages += [(head, b"") for head in ([_MESSAGE, _LONGEST + 1], [_MESSAGE, 2**50], [_MESSAGE, -5], [_MAGIC, 4])]
    heard = []
    for header, raw in messages:
        here = channel()
        if rank == 0:
            heard.append(told(lambda here=here: here.exchange(1.0, "loss")))
            continue
        dist.send(padded(header), 0)
        if raw:
            dist.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0)
        heard.append(here._hear("loss", ["", [[1.0, ""]] * 2], 0, 20.0)[0])
    return heard


def test_a_message_is_read_or_refused_and_never_executed(pool: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed"
        here, there = pool.returned(2, hostile_messages, str(path))
        assert not path.exists()
    assert here == there  # rank 0 tells the others
    assert [text.partition(" (")[0] for text in here] == [
        "rank 0, loss: rank 1 says what cannot be read",
        "rank 0, loss: rank 1 says what cannot be read",
        "rank 0, loss: rank 1 says something of another form: do the ranks run one version of the program?",
        "rank 0, loss: rank 1 is in gradient norm",
        "rank 0, loss: ranks 0,1 have not summed the same: rank 0 made no sums, the last of none; rank 1 made 1, the "
        "last of a sum of 3",
        *["rank 0, loss: what rank 1 says of its sums cannot be read"] * 2,
        *[NO_MESSAGE] * 4,
    ]


def hostile_gradients(rank: int) -> list[str]:
    here = channel()
    if rank == 1:
        here.receive(0, DUE)
        for numbers in ([0, 1, 3], [0, 2, 1, 2], [3, 1, 2]):
            dist.send(padded([_MAGIC, 0, 0, 0, 1, *numbers]), 0)
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
        f"rank 0: gradient of a[0] microbatch 0 from rank 1 is {what}, but torch.float32 [2] was sent"
        for what in ("torch.float32 [3]", "torch.float32 [1, 2]", "torch.float64 [2]")
    ] + ["nothing: tensor([1., 1.])"]


def any_header(rank: int) -> None:
    here = channel()
    number = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)

    @settings(max_examples=100, derandomize=True, database=None, deadline=None)
    @given(st.lists(number, min_size=_HEADER - 1, max_size=_HEADER - 1), st.booleans())
    def test(numbers: list[int], right_until_shape: bool) -> None:
        if right_until_shape:
            numbers[:4] = [0, 0, 0, 0]
        sent = iter([torch.tensor([_MAGIC, *numbers])])

        def come(tensor: torch.Tensor, *_: Any) -> None:
            if (header := next(sent, None)) is not None:
                tensor.copy_(header)

        here._receive_into = come  # type: ignore[method-assign]
        try:
            found = here.receive(1, DUE)
        except PipelineError:
            return
        *_, dtype, dims = numbers[:6]
        assert found.dtype is _DTYPES[dtype] and list(found.shape) == numbers[6 : 6 + dims]

    test()


def test_any_header_is_a_tensor_or_an_error_of_the_pipeline(pool: Any) -> None:
    pool.returned(1, any_header)
