"""AdamW's state in host memory, with weights on a GPU. INTERLACE_GPU_TESTS_ON=cpu rehearses it on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu import dense
from tests.gpu.dense import DEVICE

pytest.importorskip("pydantic")

from interlace.train.offload import OffloadedAdamW

pytestmark = pytest.mark.skipif(DEVICE is None, reason=dense.WHY_SKIPPED)
SHAPES = [(1000, 1000), (17,), (512, 2048), (3, 5), (2048, 512), (1,)]


@pytest.mark.parametrize("bucket", [1, 1 << 22, 1 << 26])
def test_weights_on_a_gpu_are_those_of_adamw_on_the_cpu(bucket: int) -> None:
    assert DEVICE is not None
    generator = torch.Generator().manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    mine = [nn.Parameter(p.detach().to(DEVICE, copy=True)) for p in theirs]
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    given = [{"params": part, "lr": 1e-2, "weight_decay": 0.1} for part in (mine[:4], mine[4:])]
    ours = OffloadedAdamW(given, bucket_bytes=bucket, **options)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True, **options)
    for _ in range(5):  # no wait in between: the next step's gradients come while the last weights are in flight
        for a, b in zip(mine, theirs, strict=True):
            b.grad = torch.randn(b.shape, generator=generator)
            a.grad = b.grad.to(DEVICE)
        ours.step()
        ours.zero_grad()
        adamw.step()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))
    assert {value.device.type for state in ours.state.values() for value in state.values()} == {"cpu"}
    assert all(buffer.is_pinned() == (DEVICE.type != "cpu") for buffer in ours._buffers)
