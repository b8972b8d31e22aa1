"""A HuggingFace model with rows dealt to two ranks: labels, RoPE positions and mask come from one TokenShards."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.nn import functional as F

from interlace.attention import AttentionPlan
from interlace.attention.hf import use_plan
from interlace.balance import distribute_tokens
from interlace.comm import ContextParallelPlan, context_parallel_attention, run_local, shard, unshard
from interlace.masks import BitfieldMask, Segment

transformers = pytest.importorskip("transformers")

VOCAB, WORLD = 50, 2
here = threading.local()  # of each rank: (plan, shards)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """HuggingFace's attention interface for the rank of this thread."""
    assert attention_mask is None
    out = context_parallel_attention(query, key, value, *here.microbatch, scale=scaling, heads_per_chunk=1)
    return out.transpose(1, 2).contiguous(), None


def tiny_llama(implementation: str):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    for parameter in model.parameters():  # wide range, so that attention is far from uniform
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_loss_and_gradients_equal_one_process():
    transformers.AttentionInterface.register("context_parallel", attention)
    transformers.AttentionMaskInterface.register("context_parallel", lambda *args, **kwargs: None)

    documents = [[("text", 20), ("image", 9), ("text", 14)], [("text", 11), ("image", 9), ("text", 24)]]
    mask = BitfieldMask.pack([BitfieldMask.from_segments([[Segment(*run) for run in runs]]) for runs in documents])
    length = mask.length
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (1, length), generator=generator)
    positions = mask.pos.long()
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].masked_fill(F.pad(mask.doc.diff(), (0, 1)) != 0, -100)
    count = int((labels >= 0).sum())

    plan = AttentionPlan.build(mask, block=16)
    whole = tiny_llama("interlace")
    with use_plan(plan):
        logits = whole(input_ids=ids, position_ids=positions, use_cache=False).logits
    wanted = F.cross_entropy(logits.mT, labels, reduction="sum") / count
    wanted.backward()

    shards = distribute_tokens(plan.row_blocks(), WORLD, block=16, lengths=length)
    sharded = tiny_llama("context_parallel")
    sharded.load_state_dict(whole.state_dict())
    models = [copy.deepcopy(sharded) for _ in range(WORLD)]

    def rank(group):
        model = models[group.rank]
        here.microbatch = ContextParallelPlan.build(mask, shards, group.rank), shards
        mine = shard(ids, shards, group.rank)
        targets = shard(labels, shards, group.rank, pad=-100)
        logits = model(input_ids=mine, position_ids=shard(positions, shards, group.rank), use_cache=False).logits
        loss = F.cross_entropy(logits.mT, targets, reduction="sum") / count
        loss.backward()
        return loss.detach(), unshard(logits.detach(), shards)

    results = run_local(WORLD, rank)
    for _, gathered in results:
        torch.testing.assert_close(gathered, logits.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sum(loss for loss, _ in results), wanted.detach(), rtol=1e-12, atol=0)
    compared = 0
    for name, parameter in whole.named_parameters():
        total = sum(dict(model.named_parameters())[name].grad for model in models)
        assert float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
        compared += 1
    assert compared == 21
