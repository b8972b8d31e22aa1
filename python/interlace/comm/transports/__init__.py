"""How bytes move between ranks: one interface (`base`), one file per implementation."""

from interlace.comm.transports.base import Capabilities, CommError, Copy, Ticket, Transport
from interlace.comm.transports.local import LocalHub, LocalTransport, run_local

__all__ = ["Capabilities", "CommError", "Copy", "LocalHub", "LocalTransport", "Ticket", "Transport", "run_local"]
