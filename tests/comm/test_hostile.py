"""Damaged or hostile peers while ranks connect: an error, and none of their data is executed or opened."""

from __future__ import annotations

import json
import os
import pickle
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from interlace._core import Exchange
from interlace.comm import CommError, connect
from interlace.comm.process.agreement import NO_ARGUMENTS
from interlace.comm.process.messages import OtherOperation, decode, encode
from interlace.comm.process.store import is_loopback, tcp_store
from interlace.comm.transports import Copy, shm
from interlace.comm.transports.header import header_of, pack
from interlace.comm.transports.shm import Segment, ShmTransport, start_time_of
from tests.comm.jobs import TIMEOUT
from tests.sockets import LOOPBACK, listens_on

# ---------------------------------------------------------------------- messages

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values, st.text())
def test_a_message_arrives_as_it_was_sent(value: Any, what: str) -> None:
    assert decode(encode(what, value), what, value) == value


@given(values, values)
def test_a_message_of_another_form_is_refused(value: Any, other: Any) -> None:
    def form(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: form(inner) for key, inner in x.items()}
        return [form(inner) for inner in x] if isinstance(x, list) else type(x).__name__

    if form(value) == form(other):
        decode(encode("a test", other), "a test", value)
    else:
        with pytest.raises(ValueError, match="sent a message of another form"):
            decode(encode("a test", other), "a test", value)


@given(st.binary(max_size=200) | st.text().map(str.encode) | values.map(json.dumps).map(str.encode))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"sent (an unreadable message|a message of another form|\d+ bytes)|is in"):
        decode(raw, "what nobody says", 1)


def test_what_is_deep_long_or_of_another_occasion() -> None:
    for raw in (b"[" * 100_000, b'["a test",' + b"[" * 100_000, b'["a test", ' + b"9" * 10_000 + b"]", b"\xff", b""):
        with pytest.raises(ValueError, match="sent an unreadable message"):
            decode(raw, "a test", [])
    with pytest.raises(OtherOperation, match=r"is in another test$"):
        decode(encode("another test", 1), "a test", 1)
    assert decode(encode("a test", float("nan")), "a test", 0.0) != 0  # a loss may be NaN


# ---------------------------------------------------------------------- connecting


class Executed:
    """Its pickle creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def hostile(rank: int, path: str) -> list[str]:
    """Rank 1 writes arbitrary data where rank 0 reads; returns rank 0's errors."""
    introduction: dict[str, Any] = {"wanted": "auto", "device": "cpu", "host": "here", "can": {}}
    messages: list[bytes] = [
        pickle.dumps(("choosing a transport", Executed(path))),
        encode("choosing a transport", [1, 2, 3]),
        encode("choosing a transport", introduction),
        encode("choosing a transport", {**introduction, "wanted": {"a": 1}}),
        encode("something else", introduction),
        b"[" * 100_000,
        b'["choosing a transport", "' + b"x" * (2 << 20) + b'"]',
    ]
    lines = []
    for number, raw in enumerate(messages):
        if rank == 1:
            store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
            dist.PrefixStore(f"interlace/connection/{number + 1}", store).set("round 1 of 1", raw)
        else:
            with pytest.raises(CommError, match=r"rank 0\b") as error:
                connect(timeout=TIMEOUT)
            lines.append(str(error.value))
        dist.barrier()
    return lines


def test_what_a_hostile_peer_says_is_not_executed(pool: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed"
        pickle.loads(pickle.dumps(Executed(str(path))))
        assert path.exists()  # it would otherwise
        path.unlink()
        (told, _) = pool.returned(2, hostile, str(path))
        assert not path.exists()
    assert [text.partition("rank 1 ")[2].partition(" (")[0] for text in told] == [
        "sent an unreadable message",
        *["sent a message of another form: run the same version of the program on all ranks"] * 3,
        "is in something else: the programs of the ranks differ",
        "sent an unreadable message",
        f"sent {(2 << 20) + 28} bytes, more than {1 << 20}",
    ]


def test_only_memory_of_this_user_that_has_no_name_is_opened(tmp_path: Path) -> None:
    """A peer passes the number under which it holds the memory. The memory is inspected before it is opened."""
    descriptor = Segment.create(2, 4096)
    size, me = Exchange.size(2, 4096), os.getpid()
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    os.close(shm._opened(me, descriptor, size))

    (tmp_path / "named").write_bytes(bytes(size))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    named, null = os.open(tmp_path / "named", os.O_RDWR), os.open("/dev/null", os.O_RDWR)
    pipe = os.open(fifo, os.O_RDWR)
    for number, length in ((named, size), (null, 0), (pipe, 0), (descriptor, size - 1)):
        with pytest.raises(CommError, match=f"descriptor {number} of process {me} is not the memory that rank 0 made"):
            shm._opened(me, number, length)
    for process, number in ((me, 10_000), (-1, descriptor), (2**40, 3)):
        with pytest.raises(OSError, match="No such file"):
            shm._opened(process, number, size)
    for number in (descriptor, named, null, pipe):
        os.close(number)


@pytest.mark.parametrize("place", [4, 2**62, 2**63, 2**63 + (64 << 48), 2**64 - 1])
def test_a_place_that_is_none_is_refused(place: int) -> None:
    """Rank 0 is emulated by the contents of `RankPage` and `PairPage` of csrc/comm/exchange.h."""
    rank_page, pair_page, pieces, places, header = 5760, 1280, 8, 128, 256
    descriptor = Segment.create(2, 4096)
    me, segment = (os.getpid(), start_time_of(os.getpid())), Segment(2, 4096, descriptor)
    os.close(descriptor)
    start = 2 * rank_page + pair_page  # from rank 0 to rank 1

    def write(at: int, value: int) -> None:
        segment.bytes[start + at : start + at + 8].view(np.uint64)[0] = value

    raw = pack(header_of(0, "a test", NO_ARGUMENTS, [torch.ones(8)]))
    segment.bytes[start + header : start + header + len(raw)] = np.frombuffer(raw, np.uint8)
    write(places, place)
    write(pieces, 1)
    write(0, 1)  # headers
    with ShmTransport(1, segment, [me, me], timeout=TIMEOUT) as there:
        with pytest.raises(CommError, match=f"rank 1: rank 0 refers to region {place}: its memory is damaged"):
            there.copy_batch([], [Copy(0, torch.empty(8))], "a test").wait()


# ---------------------------------------------------------------------- the store


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_the_given_address_alone(host: str) -> None:
    before, port, stores = listens_on(), free_port(), {}

    def rank(number: int) -> None:
        stores[number] = tcp_store(host, port, number, 2, TIMEOUT)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert listens_on() - before == {(LOOPBACK, port)}
    stores.clear()
    assert listens_on() == before


def test_what_the_store_cannot_listen_on() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1 port"):  # an address reserved for documentation
        tcp_store("192.0.2.1", 29500, 0, 2, 1.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {store.port} .Address already in use"):
        tcp_store("127.0.0.1", store.port, 0, 2, 1.0)
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("192.0.2.1")
