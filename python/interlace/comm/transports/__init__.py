"""Transports: move bytes between ranks, with one interface (`base`) and one file per implementation."""

from interlace.comm.process.errors import CommError
from interlace.comm.transports.base import Capabilities, Copy, Transport
from interlace.comm.transports.choose import capabilities, connect
from interlace.comm.transports.emulated import EmulatedTransport
from interlace.comm.transports.local import LocalHub, LocalTransport, run_local

__all__ = [
    "Capabilities",
    "CommError",
    "Copy",
    "EmulatedTransport",
    "LocalHub",
    "LocalTransport",
    "Transport",
    "capabilities",
    "connect",
    "run_local",
]
