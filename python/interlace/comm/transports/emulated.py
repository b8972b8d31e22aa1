"""A link of a given speed over any transport: what overlaps with what, shown on a machine that has no such link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from interlace.comm.transports.base import NO_ARGUMENTS, Arguments, Capabilities, Copy, Forwarding, Ticket, Transport


class EmulatedTransport(Forwarding):
    """`inner`, but a batch is not done before a link of its own would have brought this rank its bytes.

    The link takes one batch after the other, in the order in which they are issued: the bytes of a batch occupy it for
    bytes / bandwidth, and arrive `latency` later. It sleeps meanwhile, as a processor may whose copy engine works. What
    comes to this rank counts, from the moment this rank asks for it; if a peer sends later, `inner` waits for it.

    bandwidth: bytes per second. latency: seconds. For tensors on a CPU; closing it closes `inner`.
    """

    def __init__(self, inner: Transport, *, bandwidth: float, latency: float = 0.0) -> None:
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be a positive number of bytes per second, got {bandwidth}")
        if not 0 <= latency < float("inf"):
            raise ValueError(f"latency must be a finite number of seconds, not negative, got {latency}")
        if inner.device.type != "cpu":
            raise ValueError(f"a link is emulated for CPU tensors only, {inner.name} moves {inner.device}")
        super().__init__(inner)
        self.bandwidth, self.latency = bandwidth, latency
        self.name = f"emulated {inner.name}"
        self._lock = threading.Lock()
        self._free = 0.0  # when the last bytes that were asked for will have left the link

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities("emulated", "cpu")

    def copy_batch(
        self,
        outgoing: Sequence[Copy],
        incoming: Sequence[Copy],
        label: str,
        then: Callable[[], None] | None = None,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:
        size = sum(tensor.nbytes for _, tensor in incoming)
        with self._lock:
            began = max(self._free, time.perf_counter())
            self._free = began + size / self.bandwidth
            due = self._free + self.latency
        if self.trace is not None:
            self.trace.mark("issue", label)

        def arrive() -> None:
            time.sleep(max(due - time.perf_counter(), 0.0))
            if self.trace is not None:
                self.trace.add("copy", label, began, time.perf_counter())
            if then is not None:
                then()

        return self.inner.copy_batch(outgoing, incoming, label, arrive, arguments)
