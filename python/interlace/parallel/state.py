"""Whole parameters of a module that `tensor_parallel` has cut: for checkpoints and comparisons.

Loading needs no function of this module: `load_state_dict` of the cut module accepts the whole module's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from interlace.parallel.layer import ParallelLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of the ordinary module, on every rank: tensors, and results of get_extra_state of its parts.

    Collective; cut parameters are gathered one by one.
    """
    return {
        key: owner.gather(name, value) if isinstance(owner, ParallelLayer) else _plain(value)
        for key, owner, name, value in _entries(module)
    }


def dtensor_state_dict(module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """The state dict with every tensor as a DTensor of `mesh`: Shard if it is cut, otherwise Replicate.

    torch.distributed.checkpoint can save it, and load it in place, under any number of ranks. Nothing is copied.

    Args:
        mesh: one-dimensional, for example mesh["tp"], over the ranks among which the module was cut.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions: pass the one that shards the module, for example mesh['tp']"
        )
    entries: dict[str, Any] = {}
    for key, owner, name, value in _entries(module):
        placement: Replicate | Shard = Replicate()
        if isinstance(owner, ParallelLayer) and name in owner.cut:
            if owner.ranks.world != mesh.size():
                raise ValueError(
                    f"{key} is sharded among {owner.ranks.world} ranks, but mesh has {mesh.size()}: pass the mesh of "
                    "these ranks"
                )
            if owner.parts > 1 and owner.ranks.world > 1:
                raise ValueError(
                    f"{key} is {owner.parts} layers fused in one, each of them sharded, which a DTensor "
                    "cannot express: save full_state_dict(module)"
                )
            if (size := owner.sizes[owner.cut[name]]) % owner.ranks.world:
                raise ValueError(
                    f"{key} has uneven shards ({size} among {owner.ranks.world} ranks) unlike those of a DTensor: "
                    "save full_state_dict(module)"
                )
            placement = Shard(owner.cut[name])
        if isinstance(value, Tensor):
            value = DTensor.from_local(value.detach(), mesh, [placement], run_check=False)
        entries[key] = value
    return entries


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """(key, owning module, name in that module, local tensor or extra state) of each state dict entry."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for key, value in module.state_dict().items():
        path, _, name = key.rpartition(".")
        yield key, owners[path], name, value
