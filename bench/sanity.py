"""Summary of the machine before measurements: versions, clocks, matmul peak and copy bandwidth.

python -m bench.sanity
"""

from __future__ import annotations

import subprocess

import torch

from bench.measure import Clock, device, machine, matmul_peak, reason, versions

PACKAGES = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "transformers", "interlace")
QUERY = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,ecc.mode.current"


def clocks() -> str:
    """One line of nvidia-smi, or the reason why it is missing."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return reason(error)


def copy_bandwidth(clock: Clock) -> float:
    """GB/s of a copy inside the device's memory, bytes read and written."""
    source = torch.zeros((1 << 30) if clock.cuda else (1 << 24), dtype=torch.uint8, device=clock.device)
    to = torch.empty_like(source)
    best = min(clock(lambda: to.copy_(source))[1] for _ in range(5))
    return 2 * source.nbytes / best / 1e6


def main() -> None:
    at = device()
    clock = Clock(at)
    print(machine(at))
    print(versions(*PACKAGES))
    print(f"idle: {QUERY}: {clocks()}")
    peak = matmul_peak(clock, torch.bfloat16, None if clock.cuda else 256)
    print(f"after products: {clocks()}")
    print(f"bf16 product of {peak['size']}^3: {peak['tflops']:.4g} TFLOP/s; copy {copy_bandwidth(clock):,.0f} GB/s")


if __name__ == "__main__":
    main()
