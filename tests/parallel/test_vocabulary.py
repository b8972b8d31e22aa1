"""Embedding, head and loss sharded by vocabulary, on threads, against torch's own unsharded ones."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BartConfig, BartForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from interlace.comm import run_local, traced
from interlace.model import loss
from interlace.model.loss import head_cross_entropy, head_of
from interlace.parallel import Ranks, check_plan, full_state_dict, plan_for, tensor_parallel
from interlace.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_plan
from tests.model.loss import Largest
from tests.model.zoo import llama
from tests.parallel.vocabulary import gemma3
from tests.sampling import given_by_tier


def both(piece, whole):
    """A sharded layer beside its whole: the expected gradients of each parameter on this rank."""
    return [
        (p.grad, None if whole[name] is None else piece.piece(name, whole[name]))
        for name, p in piece.named_parameters()
    ]


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4), st.integers(0, 9), st.integers(1, 5), st.sampled_from([None, "scaled", 0, -1, 2]),
    st.sampled_from([(0,), (7,), (2, 5)]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(), st.integers(0, 999),
)  # fmt: skip
def test_an_embedding_of_any_words_is_that_of_the_whole(world, more, width, kind, shape, dtype, trained, seed):
    torch.manual_seed(seed)
    words = max(world, 3) + more
    if kind == "scaled":
        whole = Gemma3TextScaledWordEmbedding(words, width, padding_idx=1, embed_scale=3.3)
    else:
        whole = nn.Embedding(words, width, padding_idx=kind)
    whole = whole.to(dtype).requires_grad_(trained)
    ids, upstream = torch.randint(words, shape), torch.randn(*shape, width, dtype=dtype)
    expected = whole(ids)
    if trained:
        expected.backward(upstream)
    wanted = gradients(whole)

    def rank(group):
        cut = VocabularyEmbedding(whole, Ranks(group))
        result = cut(ids)
        assert torch.equal(result, expected.detach()) and result.requires_grad == trained
        if trained:
            result.backward(upstream)
        for mine, due in both(cut, wanted):
            assert (mine is None) == (due is None)
            torch.testing.assert_close(mine, due)
        return cut.gather("weight", cut.weight)

    assert all(torch.equal(result, whole.weight) for result in run_local(world, rank))


@given_by_tier(15, 60,
    st.integers(2, 4), st.integers(0, 30), st.integers(1, 9), st.integers(0, 29), st.booleans(), st.integers(1, 12),
    st.tuples(st.booleans(), st.booleans()), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 999),
)  # fmt: skip
def test_sharded_loss_and_gradients_equal_the_whole_head(world, rows, width, more, bias, at_once, trained, dtype, seed):
    torch.manual_seed(seed)
    words = world + more
    whole = nn.Linear(width, words, bias=bias, dtype=dtype).requires_grad_(trained[0])
    hidden = (3 * torch.randn(rows, width, dtype=dtype)).requires_grad_(trained[1])
    targets = torch.randint(words, (rows,))
    expected = cross_entropy(whole(hidden), targets, reduction="sum")
    if any(trained):
        (0.3 * expected).backward()
    wanted = gradients(whole)

    def rank(group):
        cut = VocabularyHead.from_linear(whole, group)
        mine = hidden.detach().clone().requires_grad_(trained[1])
        result = head_cross_entropy(mine, cut, targets)
        if any(trained):
            (0.3 * result).backward()
        for have, due in both(cut, wanted):
            assert (have is None) == (due is None)
            torch.testing.assert_close(have, due, rtol=1e-5, atol=1e-5)
        return result.detach(), mine.grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "LOGITS_BYTES", 4 * -(-words // world) * at_once)
        results = run_local(world, rank)
    for value, grad in results:
        torch.testing.assert_close(value, expected.detach().to(value.dtype), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, hidden.grad, rtol=1e-5, atol=1e-5)
        assert torch.equal(value, results[0][0])  # the same bits on every rank
        assert grad is None or torch.equal(grad, results[0][1])


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_loss_is_as_exact_as_with_whole_logits(monkeypatch, autocast):
    torch.manual_seed(0)
    rows, words = 512, 67
    head = nn.Linear(32, words)
    head = head if autocast else head.bfloat16()
    exact = copy.deepcopy(head).double()
    hidden, targets = torch.randn(rows, 32).bfloat16(), torch.randint(words, (rows,))
    right = hidden.double().requires_grad_()
    cross_entropy(exact(right), targets, reduction="sum").backward()
    mine = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cross_entropy(head(mine).float(), targets, reduction="sum").backward()
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * words * 16)

    def rank(group):
        cut = VocabularyHead.from_linear(head, group)
        x = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            head_cross_entropy(x, cut, targets).backward()
        assert [p.grad.dtype for p in cut.parameters()] == [p.dtype for p in cut.parameters()]
        return [cut.gather(name, p.grad) for name, p in cut.named_parameters()] + [x.grad]

    whole = [p.grad for p in head.parameters()] + [mine.grad]
    best = [p.grad for p in exact.parameters()] + [right.grad]
    for result in run_local(3, rank):
        for a, b, c in zip(whole, result, best, strict=True):
            # Hidden states are three rounded sums here, and one in the unsharded layer.
            assert (b.double() - c).norm() <= 1.5 * (a.double() - c).norm() + 1e-3 * c.norm()


def test_no_rank_materializes_whole_logits(monkeypatch):
    whole, hidden, targets = nn.Linear(3, 70), torch.randn(50, 3), torch.randint(70, (50,))
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 35 * 8)

    def rank(group):
        cut, mine = VocabularyHead.from_linear(whole, group), hidden.clone().requires_grad_()
        with Largest() as seen:
            head_cross_entropy(mine, cut, targets).backward()
        return seen.elements

    assert run_local(2, rank) == [35 * 8] * 2


def test_gradients_of_hidden_states_are_summed_part_by_part(monkeypatch):
    """A sum overlaps with the gradient of the head. Ranks with unequal numbers of words have the same parts."""
    torch.manual_seed(0)
    whole, targets = nn.Linear(4, 7), torch.randint(7, (12,))
    hidden = torch.randn(12, 4, requires_grad=True)
    cross_entropy(whole(hidden), targets, reduction="sum").backward()
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 12)  # 3 rows of 4 words, or 4 rows of 3

    def rank(group):
        cut, mine = VocabularyHead.from_linear(whole, group), hidden.detach().clone().requires_grad_()
        result = head_cross_entropy(mine, cut, targets)
        with traced(group) as trace:
            result.backward()
        torch.testing.assert_close(mine.grad, hidden.grad, rtol=1e-5, atol=1e-6)
        return [event.label for event in trace.of("issue")]

    assert run_local(2, rank) == [["all_reduce"] * 4] * 2


@pytest.mark.parametrize("bias", [False, True])
def test_forward_of_the_head_gives_whole_logits_on_every_rank(bias):
    torch.manual_seed(0)
    whole, x = nn.Linear(4, 11, bias=bias), torch.randn(2, 5, 4, requires_grad=True)
    upstream = torch.randn(2, 5, 11)
    expected = whole(x)
    (expected**2).backward(upstream)

    def rank(group):
        cut, mine = VocabularyHead.from_linear(whole, group), x.detach().requires_grad_()
        result = cut(mine)
        (result**2).backward(upstream)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(mine.grad, x.grad)
        for have, due in both(cut, gradients(whole)):
            torch.testing.assert_close(have, due)

    run_local(3, rank)


# ---------------------------------------------------------------------- in a model


def step(model, ids):
    out = model(input_ids=ids, use_cache=False).logits
    (out.float() ** 2).mean().backward()
    return out.detach()


def bart(**changes):
    sizes = {"d_model": 24, "decoder_layers": 2, "decoder_ffn_dim": 24, "decoder_attention_heads": 4}
    return BartForCausalLM(BartConfig(vocab_size=41, scale_embedding=True, dropout=0.0, **sizes, **changes))


FAMILIES = {
    "llama": lambda tied: llama(num_key_value_heads=2, vocab_size=41, tie_word_embeddings=tied),
    "gemma3": lambda tied: gemma3(tie_word_embeddings=tied),
    "bart": lambda tied: bart(tie_word_embeddings=tied),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "sequence_parallel"), [*((name, False) for name in FAMILIES), ("llama", True)])
def test_models_with_their_vocabulary_cut_by_plan(name, sequence_parallel, tied):
    """Odd vocabulary over two ranks; loads and saves an unsharded checkpoint."""
    torch.manual_seed(0)
    whole = FAMILIES[name](tied)
    ids = torch.randint(41, (2, 6))
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    expected, wanted = step(whole, ids), gradients(whole)

    def rank(group):
        model = FAMILIES[name](tied)
        plan = ({"": "replicate"} if name == "bart" else plan_for(model)) | vocabulary_plan(model)
        assert list(plan.values()).count("vocabulary") == 2
        tensor_parallel(model, plan, group, sequence_parallel=sequence_parallel).load_state_dict(state)
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head_of(model) is head and (table.weight is head.weight) == tied
        assert head.weight.shape == (21 - group.rank, 24) and head.first == 21 * group.rank
        torch.testing.assert_close(step(model, ids), expected)
        for owner, key in ((table, "weight"), (head, "weight")):
            full = next(n for n, p in whole.named_parameters() if p is getattr_of(whole, owner is table))
            due = owner.piece(key, wanted[full])
            assert (getattr(owner, key).grad - due).norm() <= 1e-5 * due.norm()
        assert all(torch.equal(value, state[key]) for key, value in full_state_dict(model).items())

    run_local(2, rank)


def getattr_of(model, is_table):
    return (model.get_input_embeddings() if is_table else model.get_output_embeddings()).weight


def test_pieces_make_the_whole():
    torch.manual_seed(0)
    whole, result = nn.Linear(3, 11), {"weight": torch.zeros(11, 3), "bias": torch.zeros(11)}
    spans = []
    for place in range(4):
        cut = VocabularyHead.from_linear(whole, Ranks.at(place, 4))
        spans.append((cut.first, len(cut.weight)))
        for name, parameter in cut.named_parameters():
            cut.region(name).put(result[name], parameter.detach())
    assert spans == [(0, 3), (3, 3), (6, 3), (9, 2)]
    assert all(torch.equal(result[name], parameter) for name, parameter in whole.named_parameters())


# ---------------------------------------------------------------------- refused


def test_a_word_that_is_not_there_is_nobodys_and_no_zero():
    table, head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def rank(group):
        for ids in ([0, 5], [-1, 2]):
            with pytest.raises(RuntimeError, match="an id is outside the vocabulary of 5 tokens"):
                VocabularyEmbedding(table, Ranks(group))(torch.tensor(ids))
            with pytest.raises(RuntimeError, match="a target is outside the vocabulary of 5 words"):
                head_cross_entropy(torch.zeros(2, 4), VocabularyHead.from_linear(head, group), torch.tensor(ids))

    run_local(2, rank)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + super().forward(self.num_embeddings - 1 - ids)


class Model(nn.Module):
    def __init__(self, table, head):
        super().__init__()
        self.table, self.head = table, head

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head


def hooked():
    head = nn.Linear(4, 7)
    head.register_forward_hook(lambda *_: None)
    return head


@pytest.mark.parametrize(
    ("table", "head", "message"),
    [
        (
            Doubled(7, 4),
            nn.Linear(4, 7),
            r"table is a Doubled: only an nn.Linear or plain or scaled nn.Embedding inside",
        ),
        (nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 7), r"table has max_norm, scale_grad_by_freq, sparse"),
        (nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7), r"table has max_norm, scale_grad_by_freq, sparse"),
        (nn.Embedding(7, 4), hooked(), r"head has hooks or parameters that a plain nn.Linear lacks"),
    ],
)
def test_what_is_more_than_a_table_or_a_product_stays_whole(table, head, message):
    model = Model(table, head)
    assert vocabulary_plan(model) == {}
    with pytest.raises(ValueError, match=message):
        check_plan(model, {"table": "vocabulary", "head": "vocabulary"}, 2)


def test_refused_plans():
    model = Model(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    assert vocabulary_plan(model, "a") == {"a.table": "vocabulary", "a.head": "vocabulary"}
    for path, refused in (
        ("table", "table: the vocabulary has 7 tokens, fewer than 8 ranks"),
        ("head", "head: .* = 7 is not divisible by 8 ranks"),
    ):
        with pytest.raises(ValueError, match=refused):
            check_plan(model, {"table": "replicate", "head": "replicate", path: "vocabulary"}, 8)
    with pytest.raises(ValueError, match=r'table is a Embedding: only an nn.Linear inside a module can be "column"'):
        check_plan(model, {"table": "column", "head": "replicate"}, 2)
    model.head.weight = model.table.weight
    check_plan(model, {"table": "vocabulary", "head": "vocabulary"}, 2)
    with pytest.raises(
        ValueError,
        match=r'head, table share a parameter, which cannot be sharded: use "replicate", or "vocabulary" for all',
    ):
        check_plan(model, {"table": "replicate", "head": "vocabulary"}, 2)
