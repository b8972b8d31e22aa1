"""Memory load in the background of race tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def memory_load(device: torch.device | str = "cpu", size: int = 64 << 20) -> Iterator[None]:
    """Streams through two buffers of `size` bytes, larger than the caches, in a background thread: on the CPU, or on a
    GPU in a separate stream."""
    stop = threading.Event()
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    def on_cpu() -> None:
        buffers = [np.zeros(size, dtype=np.uint8) for _ in range(2)]
        while not stop.is_set():
            np.copyto(*buffers)  # releases the GIL

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
