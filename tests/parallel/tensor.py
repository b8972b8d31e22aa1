"""Comparison of sharded modules with unsharded ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.families import FAMILIES, randomize

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole rows"])


def assert_close(have, want, what=""):
    """To 1e-5 of the largest element, or of 1: the gradient of a bias may be 0 except for rounding."""
    assert have.shape == want.shape and have.dtype == want.dtype, what
    error = (have - want).abs().max() / want.abs().max().clamp(min=1)
    assert error <= 1e-5, f"{what}: {error:.1e}"


def assert_same_gradients(whole, per_rank):
    """Shards are joined along the dimension in which they are smaller; unsharded gradients must be equal on all
    ranks."""
    for name, want in whole.items():
        pieces = [grads[name] for grads in per_rank]
        if want is None:
            assert all(piece is None for piece in pieces), name
            continue
        smaller = [d for d in range(want.dim()) if pieces[0].shape[d] != want.shape[d]]
        for piece in [torch.cat(pieces, smaller[0])] if smaller else pieces:
            assert_close(piece, want, name)
        if not smaller:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs from rank to rank"


def family(name, **changes):
    torch.manual_seed(0)
    return randomize(FAMILIES[name].model(**changes)), FAMILIES[name].inputs(12)


def whole_linear(layer):
    """The whole nn.Linear of a shard, on every rank. Collective."""
    whole = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    for key, parameter in layer.named_parameters():
        whole.register_parameter(key, nn.Parameter(layer.gather(key, parameter).clone(), parameter.requires_grad))
    return whole.train(layer.training)
