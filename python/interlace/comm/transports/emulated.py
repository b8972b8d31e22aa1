"""Emulated link of a given speed over any transport: shows overlap on a machine without such a link."""

from __future__ import annotations

import threading
import time

from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.transports.base import Copies, Forwarding, Then, Ticket, Transport


class EmulatedTransport(Forwarding):
    """`inner`, with batches delayed to the speed of an emulated link to this rank.

    The link serves one batch after another, in issue order. The bytes of a batch occupy it for bytes / bandwidth and
    arrive `latency` later. Delays are sleeps, so the processor stays free as with a copy engine. Only bytes received by
    this rank count, from the time this rank requests them. If a peer sends later, `inner` waits for it.

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
        self._free = 0.0  # time at which the link has sent all requested bytes

    def copy_batch(
        self, outgoing: Copies, incoming: Copies, label: str, then: Then = None, arguments: Arguments = NO_ARGUMENTS
    ) -> Ticket:
        size = sum(tensor.nbytes for _, tensor in incoming)
        with self._lock:
            start = max(self._free, time.perf_counter())
            self._free = start + size / self.bandwidth
            arrival = self._free + self.latency
        if self.trace is not None:
            self.trace.mark("issue", label)

        def arrive() -> None:
            time.sleep(max(arrival - time.perf_counter(), 0.0))
            if self.trace is not None:
                self.trace.add("copy", label, start, time.perf_counter())
            if then is not None:
                then()

        return self.inner.copy_batch(outgoing, incoming, label, arrive, arguments)
