"""Connections of a process that another thread cuts: their waiters are woken, other connections are unaffected."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from interlace.comm.channels.connections import Connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.settimeout(60)
    other.settimeout(60)
    return one, other


def test_cut_wakes_waiters_and_keeps_other_connections() -> None:
    before = pair()
    connections = Connections()
    mine = pair()
    connections.note()
    after = pair()
    woken: list[bytes] = []
    thread = threading.Thread(target=lambda: woken.append(mine[0].recv(1)))
    thread.start()
    assert connections.cut() == 2
    thread.join(60)
    assert woken == [b""]
    for one, other in (before, after):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    for end in (*before, *mine, *after):
        end.close()
    assert connections.cut() == 0


def test_until_all_are_made_every_new_one_is_cut() -> None:
    connections = Connections()
    first, second = pair(), pair()
    assert connections.cut() == 4
    assert first[0].recv(1) == second[0].recv(1) == b""
    for end in (*first, *second):
        end.close()


def test_a_number_that_another_socket_has_by_now_is_left_alone() -> None:
    connections = Connections()
    gone = pair()
    connections.note()
    numbers = {end.fileno() for end in gone}
    for end in gone:
        end.close()
    fresh = pair()
    assert {end.fileno() for end in fresh} & numbers  # the kernel returns the lowest free number
    assert connections.cut() == 0
    fresh[0].sendall(b"x")
    assert fresh[1].recv(1) == b"x"
    for end in fresh:
        end.close()
