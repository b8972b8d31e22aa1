"""Checkpoints of sharded modules: in the ordinary module's format, and in real processes."""

from __future__ import annotations

import copy

import pytest
import torch

from interlace.comm import run_local
from interlace.parallel import full_state_dict, tensor_parallel
from tests.distributed.workers import run_ranks
from tests.parallel import processes
from tests.parallel.families import FAMILIES, randomize


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ordinary_checkpoint_goes_in_and_comes_out(name, tmp_path):
    whole = randomize(FAMILIES[name].model())
    torch.save(whole.state_dict(), tmp_path / "whole.pt")

    def rank(group):
        model = tensor_parallel(randomize(FAMILIES[name].model(), seed=1), group=group)
        model.load_state_dict(torch.load(tmp_path / "whole.pt"))
        state = full_state_dict(model)
        torch.save(state, tmp_path / f"{group.rank}.pt")
        return {key: (tensor.shape, tensor.requires_grad) for key, tensor in state.items()}

    run_local(2, rank)
    for number in range(2):
        again = randomize(FAMILIES[name].model(), seed=2)
        again.load_state_dict(torch.load(tmp_path / f"{number}.pt"))
        assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values()))


class Scaled(torch.nn.Module):
    """A layer, and an entry of its state dict that is no tensor."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.history = [1.0, 0.5]

    def get_extra_state(self):
        return {"history": list(self.history)}

    def set_extra_state(self, state):
        self.history = state["history"]


def test_extra_state_passes_through():
    whole = Scaled()

    def rank(group):
        state = full_state_dict(tensor_parallel(copy.deepcopy(whole), {"up": "column"}, group))
        assert torch.equal(state.pop("up.weight"), whole.up.weight) and torch.equal(state.pop("up.bias"), whole.up.bias)
        return state

    assert run_local(2, rank) == [{"_extra_state": {"history": [1.0, 0.5]}}] * 2


def test_a_model_on_meta_is_cut_first_and_loaded_afterwards():
    whole = randomize(FAMILIES["siglip"].model())
    with torch.device("meta"):
        empty = FAMILIES["siglip"].model()

    def rank(group):
        model = tensor_parallel(copy.deepcopy(empty), group=group)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.load_state_dict(whole.state_dict(), assign=True)
        state = full_state_dict(model)
        return all(torch.equal(state[key], value) for key, value in whole.state_dict().items())

    assert run_local(2, rank) == [True, True]


def returned(results):
    for kind, value in results:
        assert kind == "returned", value
    return [value for _, value in results]


def test_a_module_cut_along_a_mesh_of_processes():
    module = processes.Gated()
    out = module(processes.example())
    (out**3).sum().backward()
    results = returned(run_ranks(2, processes.step))
    torch.testing.assert_close(torch.cat([y for y, _ in results], 1), out.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in module.named_parameters():
        pieces = [grads[name] for _, grads in results]
        for piece in [torch.cat(pieces, processes.CUT[name])] if name in processes.CUT else pieces:
            torch.testing.assert_close(piece, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fsdp_shards_along_another_mesh_dimension():
    module = processes.Gated()
    (module(processes.example()) ** 3).sum().backward()
    for place, grads in returned(run_ranks(4, processes.sharded)):
        for name, parameter in module.named_parameters():
            mean = parameter.grad / 2  # FSDP's, over its ranks
            want = mean.chunk(2, processes.CUT[name])[place] if name in processes.CUT else mean
            torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)
