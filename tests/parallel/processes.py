"""Worker functions of the tests of `interlace.parallel` (`tests.distributed.workers`), on plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from interlace.parallel import full_state_dict, tensor_parallel

PLAN = {"norm": "sequence", "": "gather", "gate": "column", "up": "column", "down": "row"}
CUT = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}


class Gated(nn.Module):
    """A gated MLP, followed by a norm of its rows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.gate(x).tanh() * self.up(x)))


def example() -> Tensor:
    return torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1))


def step(rank: int) -> Any:
    """(output rows, gradients by name) of a module sharded along a mesh, over any transport between the processes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    module = tensor_parallel(Gated(), PLAN, mesh, num_chunks=2)
    out = module(example()[:, 6 * rank : 6 * rank + 6])
    (out**3).sum().backward()
    state = full_state_dict(module)
    assert all(torch.equal(state[key], value) for key, value in Gated().state_dict().items())
    return out.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def sharded(rank: int) -> Any:
    """(tensor rank, gradients by name) of a module sharded along one mesh dimension and by FSDP along another.

    Each data rank has half of the batch. Two steps run, the second on cleared gradients.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, place = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    module = tensor_parallel(Gated(), PLAN, mesh["tensor"])
    fully_shard(module, mesh=mesh["data"])
    for _ in range(2):
        module.zero_grad()
        out = module(example()[data : data + 1, 6 * place : 6 * place + 6])
        (out**3).sum().backward()
    return place, {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
