"""AdamW with state and update on the host CPU (``train.offload_optimizer``).

A GPU then holds weights and gradients: 8 bytes per parameter instead of 16. Each step moves 8 bytes per parameter to
the host and 4 back, through two pinned buffers. Copies overlap with the update: while the CPU updates one bucket of
parameters, the next bucket is copied. The weights stay on the device and are the only copy, so loading a checkpoint
needs no extra synchronization. Weights are fp32 under both precisions, so there are no separate master weights.

The update is torch's own fused AdamW for CPUs. It is bitwise equal to a run on the CPU with the same gradients, and
differs from a GPU's update in the last bits. **Not yet run on a GPU**: copies were tested from host memory to host
memory, and their overlap with the update is not measured.

torchao's CPUOffloadOptimizer is not used: it copies gradients in hooks of the backward pass, before ranks have summed
and clipped them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from interlace import _device
from interlace.train.config.load import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 1 << 26
_ALIGNED = 64  # bytes: a cache line


def check_device(kind: str, *, source: str = "config") -> None:
    """Raises ConfigError for ranks that compute on the CPU, where there is nothing to offload."""
    if kind == "cpu":
        raise ConfigError(
            f"{source}: train.offload_optimizer = true needs a GPU, but the ranks compute on the CPU: omit the key, or "
            "set run.device = 'cuda'"
        )


class _Staged(NamedTuple):
    """A bucket of one parameter group on its way to the host. arrived: None if the copy is synchronous."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    weights: list[Tensor]
    gradients: list[Tensor]
    arrived: torch.Event | None


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW over parameters on one device of any kind, with its state on the CPU.

    A step is bitwise equal to a step of torch's fused AdamW on the CPU with the same options.

    Args:
        parameters: as for torch's optimizers; groups have their own ``lr`` and ``weight_decay``. Parameters without a
            gradient in a step keep weight and state.
        betas, eps: of AdamW.
        bucket_bytes: size of weights that are copied at once; a larger parameter is copied alone. Each of two buffers
            holds the weights of a bucket and their gradients. Host memory is therefore four times this size, or four
            times the largest parameter if that is larger. It is pinned if the device is a GPU.
    """

    def __init__(
        self, parameters: Iterable[Any], *, betas: tuple[float, float], eps: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(parameters, betas=betas, eps=eps)
        self._bucket_bytes = bucket_bytes
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update. The last new weights may still be in flight to a GPU, ordered by its current stream."""
        copied = (self._fetch(*bucket, place) for place, bucket in enumerate(self._buckets()))
        following = next(copied, None)
        while (here := following) is not None:
            following = next(copied, None)  # copied while the CPU updates this one
            if here.arrived is not None:
                here.arrived.synchronize()
            self._update(here)
            for parameter, weight in zip(here.parameters, here.weights, strict=True):
                parameter.copy_(weight, non_blocking=True)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """step, exp_avg and exp_avg_sq of a parameter: on the host, zeros before its first update."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in MOMENTS:  # not pinned: these are never copied to the device
                state[key] = torch.zeros(parameter.shape, dtype=parameter.dtype)
        return state

    def _buckets(self) -> Iterable[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Parameters with a gradient, in the order of the groups, split into buckets."""
        for group in self.param_groups:
            bucket: list[nn.Parameter] = []
            size = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if bucket and size + parameter.nbytes > self._bucket_bytes:
                    yield group, bucket
                    bucket, size = [], 0
                bucket.append(parameter)
                size += parameter.nbytes
            if bucket:
                yield group, bucket

    def _fetch(self, group: dict[str, Any], parameters: list[nn.Parameter], place: int) -> _Staged:
        """Starts to copy a bucket's weights and gradients into the buffer of its place (0 or 1, alternating).

        Earlier copies of weights from that buffer to the device were queued before, in the same stream.
        """
        buffer = self._buffer(place % 2, parameters)
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        at = 0
        for parameter in parameters:
            assert parameter.grad is not None
            for tensor, to in ((parameter, weights), (parameter.grad, gradients)):
                there = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                there.copy_(tensor, non_blocking=True)
                to.append(there)
                at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return _Staged(group, parameters, weights, gradients, _moment(parameters[0].device))

    def _buffer(self, number: int, parameters: list[nn.Parameter]) -> Tensor:
        if not self._buffers:
            sizes = [p.nbytes for group in self.param_groups for p in group["params"]]
            most = max(min(self._bucket_bytes, sum(sizes)), max(sizes))
            room = 2 * (most + _ALIGNED * len(sizes))
            pinned = _device.on_gpu(parameters[0].device)
            self._buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        return self._buffers[number]

    def _update(self, staged: _Staged) -> None:
        group, states = staged.group, [self.state_of(parameter) for parameter in staged.parameters]
        beta1, beta2 = group["betas"]
        adamw(
            staged.weights,
            staged.gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _moment(device: torch.device) -> torch.Event | None:
    """Event after all work queued on a GPU so far."""
    return torch.accelerator.current_stream(device).record_event() if _device.on_gpu(device) else None
