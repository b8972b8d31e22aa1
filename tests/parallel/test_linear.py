"""ColumnParallelLinear and RowParallelLinear against the unsharded nn.Linear."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from interlace.comm import run_local
from interlace.parallel import ColumnParallelLinear, Ranks, RowParallelLinear
from tests.parallel.tensor import whole_linear

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole rows"])


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@SEQUENCE
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_column_and_a_row_layer_make_an_mlp(world, leading, bias, sequence_parallel):
    torch.manual_seed(0)
    up, down = (nn.Linear(*sizes, bias=bias, dtype=torch.float64) for sizes in ((6, 8), (8, 6)))
    x, upstream = (torch.randn(*leading, 3 * world, 6, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    y = down(up(x).tanh())
    y.backward(upstream)

    def rank(group):
        cut = [
            kind.from_linear(layer, group, sequence_parallel=sequence_parallel, num_chunks=2)
            for kind, layer in ((ColumnParallelLinear, up), (RowParallelLinear, down))
        ]
        rows = slice(3 * group.rank, 3 * group.rank + 3) if sequence_parallel else slice(None)
        mine = x[..., rows, :].detach().requires_grad_()
        out = cut[1](cut[0](mine).tanh())
        out.backward(upstream[..., rows, :])
        close(out, y[..., rows, :].detach())
        close(mine.grad, x.grad[..., rows, :])
        for layer, whole in zip(cut, (up, down)):
            for name, parameter in layer.named_parameters():
                close(parameter.grad, layer.piece(name, getattr(whole, name).grad))
                close(layer.gather(name, parameter.grad), getattr(whole, name).grad)

    run_local(world, rank)


def test_joined_outputs():
    torch.manual_seed(0)
    whole, x = nn.Linear(4, 6, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(5, 6, dtype=torch.float64)
    (whole(x) ** 2).backward(upstream)

    def rank(group):
        layer = ColumnParallelLinear.from_linear(whole, group, sequence_parallel=False, gather_output=True)
        mine = x.detach().requires_grad_()
        y = layer(mine)
        close(y, whole(x).detach())
        (y**2).backward(upstream)
        close(mine.grad, x.grad)
        close(layer.weight.grad, whole.weight.grad.chunk(2)[group.rank])

    run_local(2, rank)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_to_and_from_the_whole(kind):
    whole = nn.Linear(4, 8).eval()
    whole.weight.requires_grad_(False)
    state = {name: value.clone() for name, value in whole.state_dict().items()}

    def rank(group):
        layer = kind.from_linear(whole, group)
        assert not layer.training and not layer.weight.requires_grad and layer.bias.requires_grad
        assert layer.weight.untyped_storage().nbytes() == 4 * layer.weight.numel() == 4 * 16
        back = whole_linear(layer)
        assert type(back) is nn.Linear and not back.training and not back.weight.requires_grad
        assert all(torch.equal(back.state_dict()[name], state[name]) for name in state)
        with torch.no_grad():
            back.weight.zero_()  # its own memory
        assert torch.equal(layer.weight, layer.piece("weight", whole.weight))

    run_local(2, rank)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_ordinary_checkpoints_load(kind, assign):
    whole = nn.Sequential(nn.Linear(4, 8))
    state = whole.state_dict()

    def rank(group):
        model = nn.Sequential(kind(4, 8, group=group, device="meta" if assign else None))
        model.load_state_dict(state, assign=assign)
        for name in ("weight", "bias"):
            assert torch.equal(getattr(model[0], name), model[0].piece(name, state[f"0.{name}"]))
        assert model[0].weight.untyped_storage().nbytes() == 4 * model[0].weight.numel()
        mine = copy.deepcopy(model.state_dict())
        model.load_state_dict(mine, assign=assign)  # its own pieces load too
        assert torch.equal(model[0].weight, mine["0.weight"])
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            model.load_state_dict({**state, "0.weight": torch.zeros(3, 4)})
        with pytest.raises(RuntimeError, match=r"Missing key.*0.weight"):
            model.load_state_dict({"0.bias": state["0.bias"]})

    run_local(2, rank)
    assert {name: value.shape for name, value in state.items()} == {"0.weight": (8, 4), "0.bias": (8,)}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_new_layer_is_a_piece_of_what_linear_would_be(kind):
    generator_state, lock = torch.get_rng_state(), threading.Lock()
    whole = nn.Linear(4, 8)

    def rank(group):
        with lock:  # one random state for all threads
            torch.set_rng_state(generator_state)
            layer = kind(4, 8, group=group)
        assert torch.equal(layer.weight, layer.piece("weight", whole.weight))
        assert torch.equal(layer.bias, layer.piece("bias", whole.bias))

    run_local(2, rank)


def test_a_copy_keeps_its_ranks():
    whole = nn.Linear(4, 8)

    def rank(group):
        layer = RowParallelLinear.from_linear(whole, group)
        twin = copy.deepcopy(layer)
        assert twin.ranks is layer.ranks and twin.weight is not layer.weight
        twin(torch.ones(2, 2)).sum().backward()
        return twin.bias.grad

    assert all(torch.equal(grad, torch.full((8,), 2.0)) for grad in run_local(2, rank))


def test_ranks_of_what_none_means():
    assert (Ranks().rank, Ranks().world) == (0, 1)
    assert run_local(3, lambda group: (Ranks().group is group, Ranks().rank, Ranks(group).world)) == [
        (True, rank, 3) for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ColumnParallelLinear(4, 7), "ColumnParallelLinear: out_features = 7 is not divisible by 2 ranks"),
        (lambda: RowParallelLinear(7, 4), "RowParallelLinear: in_features = 7 is not divisible by 2 ranks"),
        (lambda: ColumnParallelLinear(4, 8)(torch.ones(2, 5)), r"takes \[..., 4\] here, got \[2, 5\]"),
        (lambda: RowParallelLinear(8, 4)(torch.ones(2, 8)), r"takes \[..., 4\] here, got \[2, 8\]"),
        (lambda: RowParallelLinear(8, 4)(torch.ones(3, 4)), "3 rows are not divisible by 2 ranks"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        run_local(2, lambda group: call())


def test_layers_say_what_they_are():
    text = run_local(2, lambda group: repr(ColumnParallelLinear(4, 8, bias=False)))[1]
    assert text == ("ColumnParallelLinear(in_features=4, out_features=8, bias=False, rank=1/2, sequence_parallel=True)")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_pieces_make_the_whole(parts):
    torch.manual_seed(0)
    whole, result = nn.Linear(5, 12), {"weight": torch.zeros(12, 5), "bias": torch.zeros(12)}
    for place in range(2):
        layer = ColumnParallelLinear.from_linear(whole, Ranks.at(place, 2), sequence_parallel=False, parts=parts)
        for name, parameter in layer.named_parameters():
            layer.region(name).put(result[name], parameter.detach())
    assert all(torch.equal(result[name], parameter) for name, parameter in whole.named_parameters())


@pytest.mark.parametrize("leading", [(), (1,), (2,), (2, 3)])
def test_rows_of_any_number_are_joined(leading):
    counts = [2, 0, 5]
    pieces = torch.arange(7.0 * 4).view(7, 4).expand(*leading, 7, 4).split(counts, -2)

    def rank(group):
        ranks = Ranks.at(group.rank, group.world)
        with pytest.raises(ValueError, match=r"rank . of 3, but the module was sharded for rank 5 of 6"):
            Ranks.at(5, 6).connect(group)
        ranks.connect(group)
        return ranks.gather_rows(pieces[group.rank], counts)

    for result in run_local(3, rank):
        assert torch.equal(result, torch.cat(pieces, -2)) and result.is_contiguous()
    assert Ranks.at(0, 1).gather_rows(pieces[0], counts) is pieces[0]
