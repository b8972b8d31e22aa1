"""Blocks and models of every family, sharded by their ready plans, against the unsharded modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from interlace.comm import run_local, traced
from interlace.model.checkpointing import set_checkpointing
from interlace.parallel import check_plan, full_state_dict, plan_for, tensor_parallel
from interlace.parallel.tensor import SharedInput
from tests.parallel.families import FAMILIES, HIDDEN, first_tensor, randomize
from tests.parallel.tensor import SEQUENCE, assert_close, assert_same_gradients, family

RANKS = pytest.mark.parametrize("world", [2, 4])
FAMILY = pytest.mark.parametrize("name", FAMILIES)


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@FAMILY
@SEQUENCE
@RANKS
def test_a_block_is_what_it_was(name, sequence_parallel, world):
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = randomize(family.model())
    block, hidden = family.block(model), torch.randn(2, 12, HIDDEN, requires_grad=True)
    around, upstream = family.surroundings(model, hidden), torch.randn(2, 12, HIDDEN)
    out = first_tensor(block(hidden, **around))
    (out * upstream).sum().backward()
    want = gradients(block)
    whole = {key: value.clone() for key, value in block.state_dict().items()}
    block.zero_grad()

    def rank(group):
        mine = tensor_parallel(copy.deepcopy(block), group=group, sequence_parallel=sequence_parallel, num_chunks=2)
        rows = slice(None)
        if sequence_parallel:
            rows = slice(group.rank * 12 // world, (group.rank + 1) * 12 // world)
        x = hidden[:, rows].detach().clone().requires_grad_()
        y = first_tensor(mine(x, **around))
        (y * upstream[:, rows]).sum().backward()
        return y.detach(), x.grad, gradients(mine), full_state_dict(mine)

    results = run_local(world, rank)
    for got, (have, wanted) in enumerate([(0, out.detach()), (1, hidden.grad)]):
        parts = [result[have] for result in results]
        joined = torch.cat(parts, dim=1) if sequence_parallel else parts[got % world]
        assert_close(joined, wanted)
    assert_same_gradients(want, [result[2] for result in results])
    for _, _, _, state in results:
        assert list(state) == list(whole) and all(torch.equal(state[key], whole[key]) for key in whole)


@FAMILY
@SEQUENCE
@RANKS
def test_a_model_is_what_it_was(name, sequence_parallel, world):
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = randomize(family.model())
    inputs = family.inputs(12)
    out = first_tensor(model(**inputs))
    upstream = torch.randn(out.shape)
    (out * upstream).sum().backward()
    want = gradients(model)
    model.zero_grad()

    def rank(group):
        mine = tensor_parallel(copy.deepcopy(model), group=group, sequence_parallel=sequence_parallel)
        y = first_tensor(mine(**inputs))
        (y * upstream).sum().backward()
        return y.detach(), gradients(mine)

    results = run_local(world, rank)
    for y, _ in results:
        assert_close(y, out.detach())
        assert torch.equal(y, results[0][0])
    assert_same_gradients(want, [grads for _, grads in results])


# ---------------------------------------------------------------------- ways to run a model


def compare(world, model, inputs, prepare=lambda whole: whole, plan=None, **options):
    """Compares one step of `model` and of its sharded copies made by `prepare`; returns their traces of the forward."""
    out = first_tensor(model(**inputs))
    upstream = torch.randn(out.shape)
    (out * upstream).sum().backward()
    want = gradients(model)
    model.zero_grad()

    def rank(group):
        mine = prepare(tensor_parallel(copy.deepcopy(model), plan, group, **options))
        with traced(group) as trace:
            y = first_tensor(mine(**inputs))
        (y * upstream).sum().backward()
        return y.detach(), gradients(mine), trace

    results = run_local(world, rank)
    for y, _, _ in results:
        assert_close(y, out.detach())
    assert_same_gradients(want, [grads for _, grads, _ in results])
    return [trace for _, _, trace in results]


def checkpointed(model):
    set_checkpointing(model.model.layers, "full")
    return model


def checkpointed_in_part(model):
    set_checkpointing(model.model.layers, "selective")
    return model


def checkpointed_by_transformers(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


PREPARATIONS = {
    "checkpointing": checkpointed,
    "selective": checkpointed_in_part,
    "transformers": checkpointed_by_transformers,
    "deepcopy": copy.deepcopy,
}


@SEQUENCE
@pytest.mark.parametrize("way", PREPARATIONS)
def test_recomputed_and_copied_models(way, sequence_parallel):
    model, inputs = family("llama")
    compare(2, model, inputs, PREPARATIONS[way], sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_sequences_of_any_length(name):
    """Numbers of rows that are no multiple of the ranks, or smaller than the number of ranks."""
    torch.manual_seed(0)
    model = randomize(FAMILIES[name].model())
    for world, length in ((4, 5), (2, 1), (4, 2), (2, 7)):
        compare(world, model, FAMILIES[name].inputs(length), length=lambda length=length: length)
    with pytest.raises(
        ValueError, match=r"got 6 rows, but length\(\) returned 5: its rows cannot be sharded, .*sequence_parallel="
    ):
        compare(2, model, FAMILIES[name].inputs(6), length=lambda: 5)


@pytest.mark.parametrize("way", PREPARATIONS)
def test_any_length_recomputed_and_copied(way):
    """A recomputed layer asks for the length again."""
    model, _ = family("llama")
    compare(4, model, FAMILIES["llama"].inputs(6), PREPARATIONS[way], length=lambda: 6)


@SEQUENCE
def test_one_rank(sequence_parallel):
    compare(1, *family("qwen2"), sequence_parallel=sequence_parallel)


def test_inputs_gathered_again_in_backward():
    compare(2, *family("whisper"), regather=True, num_chunks=2)


@SEQUENCE
def test_a_cut_language_model_head(sequence_parallel):
    model, inputs = family("llama")
    plan = {**plan_for(model), "lm_head": "column_gathered"}
    compare(4, model, inputs, plan=plan, sequence_parallel=sequence_parallel)


def test_a_tied_head_stays_whole_with_its_embeddings():
    model, inputs = family("llama", tie_word_embeddings=True)
    compare(2, model, inputs)
    with pytest.raises(ValueError, match=r"lm_head, model.embed_tokens share a parameter"):
        tensor_parallel(model, {**plan_for(model), "lm_head": "column_gathered"})


@SEQUENCE
def test_one_gather_serves_all_layers_of_an_attention(sequence_parallel):
    """Per block two transfers in, two out; without sequence parallelism none in, and a sum out.

    Before the first transfer the ranks compare their sharding once.
    """
    model, inputs = family("llama")
    for trace in compare(2, model, inputs, sequence_parallel=sequence_parallel, num_chunks=1):
        labels = [event.label.split(",")[0] for event in trace.of("issue")]
        block = ["all_gather_matmul", "matmul_reduce_scatter"] * 2
        wanted = [*block * 2, "all_gather_into_tensor"] if sequence_parallel else ["sum_of_products"] * 4
        assert labels == ["tensor_parallel", *wanted]


@SEQUENCE
def test_frozen_parameters_have_no_gradient(sequence_parallel):
    model, inputs = family("qwen2")
    for index, (_, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(index % 3 == 0)
    compare(2, model, inputs, sequence_parallel=sequence_parallel)
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    compare(2, model, inputs, sequence_parallel=sequence_parallel)


def test_thawing_a_norm_later():
    """Gradients of a norm are summed from the first forward in which it is trained."""

    def thawed(model):
        model.requires_grad_(False)
        first_tensor(model(**inputs))
        return model.requires_grad_(True)

    model, inputs = family("llama")
    compare(2, model, inputs, thawed)


def test_gradients_accumulate_over_microbatches():
    model, inputs = family("siglip")

    def once_before(model):
        first_tensor(model(**inputs)).sum().backward()
        return model

    first_tensor(model(**inputs)).sum().backward()
    want = {name: None if grad is None else 2 * grad for name, grad in gradients(model).items()}
    model.zero_grad()

    def rank(group):
        mine = once_before(once_before(tensor_parallel(copy.deepcopy(model), group=group)))
        return gradients(mine)

    assert_same_gradients(want, run_local(2, rank))


def test_autocast():
    model, inputs = family("llama")
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs).logits.float()

    def rank(group):
        mine = tensor_parallel(copy.deepcopy(model), group=group)
        with torch.autocast("cpu", torch.bfloat16):
            logits = mine(**inputs).logits
        logits.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in mine.parameters())
        return logits.float()

    for logits in run_local(2, rank):
        assert (logits - want).abs().max() <= 0.03 * want.abs().max()


class Cross(nn.Module):
    """Cross attention: keys come from another sequence, which is whole on every rank."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)

    def forward(self, x, other):
        return self.out(self.q(x).relu() * self.k(other).mean(-2, keepdim=True))


@SEQUENCE
def test_a_column_layer_applied_to_another_sequence(sequence_parallel):
    torch.manual_seed(0)
    module, x, other = randomize(Cross()), torch.randn(8, 6), torch.randn(5, 6, requires_grad=True)
    upstream = torch.randn(8, 6)
    (module(x, other) * upstream).sum().backward()
    want, d_other = gradients(module), other.grad.clone()
    module.zero_grad()

    def rank(group):
        plan = {"": "gather", "q": "column", "k": "column", "out": "row"}
        mine = tensor_parallel(copy.deepcopy(module), plan, group, sequence_parallel=sequence_parallel)
        rows = slice(4 * group.rank, 4 * group.rank + 4) if sequence_parallel else slice(None)
        theirs = other.detach().requires_grad_()
        (mine(x[rows], other=theirs) * upstream[rows]).sum().backward()
        assert mine.q.precomputed is None and mine.k.precomputed is None
        return theirs.grad, gradients(mine)

    results = run_local(2, rank)
    for grad, _ in results:
        assert_close(grad, d_other)
    assert_same_gradients(want, [grads for _, grads in results])


class Moved(nn.Module):
    """DETR's attention: queries and keys are made of the input and a position, values of the input."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, position):
        return self.out(self.q(x + position).relu() * self.v(x)) + 2 * x


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Moved()

    def forward(self, x, position):
        return self.attention(self.norm(x), position)


def test_a_column_layer_applied_to_something_made_of_the_rows():
    """Gradients of earlier layers: the part that each rank computes from the whole rows must count once."""
    torch.manual_seed(0)
    module, x, position = randomize(Around()), torch.randn(8, 6), torch.randn(8, 6)
    upstream = torch.randn(8, 6)
    (module(x, position) * upstream).sum().backward()
    want = gradients(module)
    module.zero_grad()

    def rank(group):
        plan = {"norm": "replicate", "attention": "gather", "attention.q": "column", "attention.v": "column",
                "attention.out": "row"}  # fmt: skip
        mine = tensor_parallel(copy.deepcopy(module), plan, group, sequence_parallel=False)
        (mine(x, position) * upstream).sum().backward()
        return gradients(mine)

    assert_same_gradients(want, run_local(2, rank))


def test_products_are_released_when_a_module_raises():
    def rank(group):
        module = tensor_parallel(Cross(), {"": "gather", "q": "column", "k": "column", "out": "row"}, group)
        with pytest.raises(AttributeError):
            module(torch.ones(4, 6), None)
        return module.q.precomputed

    assert run_local(2, rank) == [None, None]


# ---------------------------------------------------------------------- plans and their errors


def test_patterns_match_by_component_and_the_last_one_counts():
    model, inputs = family("llama")
    plan = {
        "model.*": "replicate",
        "lm_head": "replicate",
        "model.layers": "layers",
        "model.layers.*.self_attn": "gather",
        "model.layers.*.*layernorm": "sequence",
        "model.layers.*.self_attn.[qkv]_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp": "gather",
        "model.layers.*.mlp.*_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
    }
    compare(2, model, inputs, plan=plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head": None}, r"no pattern of the plan matches 'lm_head'.*\{'lm_head': \"replicate\"\}"),
        ({"model.layers.1.mlp.up_proj": None}, "'model.layers.1.mlp.up_proj'"),
        ({"model.layers.*.nothing": "row"}, "matches no module of LlamaForCausalLM"),
        ({"model.layers.2": "replicate"}, "'model.layers.2' matches no module"),
        ({"lm_head": "colwise"}, "the unknown style 'colwise': use one of column, "),
        ({"model.norm": "row"}, 'model.norm is a LlamaRMSNorm: only an nn.Linear inside a module can be "row"'),
        ({"model.layers.0.mlp": "layers"}, "model.layers.0.mlp is a LlamaMLP: only a ModuleList"),
        ({"model.rotary_emb": "gather"}, 'model.rotary_emb is "gather": no layer inside it is "column"; use another'),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(change, message):
    model, _ = family("llama")
    plan = {path: style for path, style in {**plan_for(model), **change}.items() if style is not None}
    before = {name: type(part) for name, part in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        run_local(2, lambda group: tensor_parallel(model, plan, group))
    with pytest.raises(ValueError, match=message):
        check_plan(model, plan, 2)
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.register_forward_hook(lambda *_: None),
        lambda linear: linear.register_full_backward_hook(lambda *_: None),
        lambda linear: linear.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
        lambda linear: torch.nn.utils.weight_norm(linear),
    ],
    ids=["forward hook", "backward hook", "parameter", "weight norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_with_more_than_a_linear_layer_has_is_not_cut(change):
    model, _ = family("llama")
    change(model.model.layers[0].mlp.down_proj)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj has hooks or parameters"):
        run_local(2, lambda group: tensor_parallel(model, None, group))


@pytest.mark.parametrize(
    ("name", "changes", "world", "message"),
    [
        (
            "llama",
            {},
            3,
            r"q_proj has 8 heads, not divisible by 3 ranks: use a number of ranks that divides 8$",
        ),
        ("qwen2", {"num_key_value_heads": 2}, 4, r"k_proj has 2 heads.*divides 2, or repeat .* to get 4 heads"),
        ("llama", {"intermediate_size": 22}, 4, r"mlp.gate_proj: .*out_features = 22 is not divisible by 4 ranks"),
        ("siglip", {}, 16, r"q_proj has 8 heads.* to get 16 heads$"),
    ],
)
def test_heads_and_features_must_divide(name, changes, world, message):
    model, _ = family(name, **changes)
    with pytest.raises(ValueError, match=message):
        run_local(world, lambda group: tensor_parallel(copy.deepcopy(model), group=group))
    with pytest.raises(ValueError, match=message):
        check_plan(model, None, world)
    assert check_plan(model, None, 2) is None


def test_a_sequence_that_does_not_divide():
    model, _ = family("llama")
    inputs = FAMILIES["llama"].inputs(13)
    with pytest.raises(ValueError, match="a sequence of 13 tokens is not divisible by 2 ranks: pad it"):
        run_local(2, lambda group: tensor_parallel(copy.deepcopy(model), group=group)(**inputs))
    compare(2, model, inputs, sequence_parallel=False)


def test_no_plan_is_known():
    with pytest.raises(ValueError, match="no tensor-parallel plan for Cross"):
        plan_for(Cross())
    with pytest.raises(ValueError, match="no tensor-parallel plan for"):
        tensor_parallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the module itself is a Linear: only an nn"):
        tensor_parallel(nn.Linear(2, 2), {"": "row"})


def test_a_hidden_state_that_cannot_be_found():
    module = tensor_parallel(Cross(), {"": "gather", "q": "column", "k": "column", "out": "row"})
    assert any(isinstance(hook, SharedInput) for hook in module._forward_pre_hooks.values())
    with pytest.raises(TypeError, match="Cross got no hidden state to shard"):
        module(other=torch.ones(2, 6))
