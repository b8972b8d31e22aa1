"""What tests of races run beside: memory that is never at rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def memory_load(device: torch.device | str = "cpu", size: int = 64 << 20) -> Iterator[None]:
    """Meanwhile a thread streams through two buffers of `size` bytes, more than caches hold, on the CPU or, by a stream
    of its own, on a GPU."""
    stop = threading.Event()
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    def on_cpu() -> None:
        buffers = [np.zeros(size, dtype=np.uint8) for _ in range(2)]
        while not stop.is_set():
            np.copyto(*buffers)  # without the interpreter's lock

    def on_gpu() -> None:
        with torch.cuda.stream(stream):
            buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
            while not stop.is_set():
                for _ in range(20):
                    buffers[0].copy_(buffers[1])
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=on_cpu if stream is None else on_gpu)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
