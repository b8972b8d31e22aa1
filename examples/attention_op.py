"""Use 1, the attention alone: in a HuggingFace model, beside eager attention, and the op by itself.

    python examples/attention_op.py

Takes seconds on a CPU. The model is small and random; with weights it is
`from_pretrained(name, attn_implementation="interlace")`, and nothing else changes.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# This import also teaches transformers the name "interlace".
from interlace import AttentionPlan, BitfieldMask, Segment, bitfield_attention


def in_a_model() -> float:
    """Largest difference between the gradients of a padded batch on "interlace" and on "eager"."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 256, (2, 48))
    padding = torch.ones_like(ids)
    padding[1, 31:] = 0  # the second sample is shorter
    gradients = {}
    for implementation in ("eager", "interlace"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, attention_mask=padding, labels=ids.where(padding.bool(), -100)).loss.backward()
        gradients[implementation] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return (gradients["eager"] - gradients["interlace"]).abs().max().item()


def by_itself() -> float:
    """Largest difference between the op and dense attention, for two packed documents with a picture each."""
    picture = Segment("image", 64)
    documents = [[Segment("text", 12), picture, Segment("text", 20)], [picture, Segment("text", 40)]]
    mask = BitfieldMask.pack([BitfieldMask.from_segments([document]) for document in documents])
    q, k, v = (torch.randn(1, 4, mask.length, 32, requires_grad=True) for _ in range(3))
    plan = AttentionPlan.build(mask)  # once per batch; every layer and head uses it
    out = bitfield_attention(q, k, v, plan)
    out.sum().backward()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense()[:, None])
    print(f"{mask.length} tokens in 2 documents, {mask.to_dense().float().mean():.0%} of all pairs visible")
    return (out - dense).abs().max().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"a Llama's gradients, interlace beside eager: at most {in_a_model():.1e} apart")
    print(f"the op beside dense attention: at most {by_itself():.1e} apart")
