"""Split backward against a whole one: time, FLOPs and kept memory of a stack of Llama layers.

    python -m bench.split_backward [--layers 4] [--hidden 512] [--tokens 1024] [--repeats 9] [--threads 1] [--out FILE]

BACKWARD_INPUT computes gradients of activations, and of norms and biases; BACKWARD_WEIGHT those of the weights of
linear layers (`interlace.run.execute.deferred`). The floor of both together is the whole backward: their FLOPs are
equal, which is checked. Kept: bytes that autograd saves of a forward, beside weights (unknown for "selective", which
saves elsewhere), and bytes between the halves. Times are medians over rounds in which whole and split backwards
alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from bench.measure import command, machine, versions, write_json
from interlace.comm.overlap.deferred import DeferredGradients
from interlace.model import Checkpointing, set_checkpointing
from interlace.run.execute.deferred import LinearLayers

ROOT = Path(__file__).parents[1]


class Stack:
    """Layers without embeddings, with an input that takes a gradient, as between stages."""

    def __init__(self, layers: int, hidden: int, tokens: int, checkpointing: Checkpointing) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64), attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        self.model = LlamaModel(config).train()
        set_checkpointing(self.model.layers, checkpointing)
        self.linears = LinearLayers(self.model, ())
        self.x = torch.randn(1, tokens, hidden, requires_grad=True)
        self.gradient = torch.randn(1, tokens, hidden)

    def forward(self) -> Tensor:
        output: Tensor = self.model(inputs_embeds=self.x).last_hidden_state
        return output

    def forget(self) -> None:
        self.x.grad = None
        for parameter in self.model.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        trained = [p for name, p in self.model.named_parameters() if not name.startswith("embed_tokens")]
        return [tensor.grad for tensor in (self.x, *trained) if tensor.grad is not None]

    def whole(self, clock: Callable[..., Any]) -> None:
        output = clock("forward", self.forward)
        clock("backward", lambda: output.backward(self.gradient))

    def split(self, clock: Callable[..., Any]) -> DeferredGradients:
        with self.linears.forward():
            output = clock("forward, split", self.forward)
        with self.linears.backward() as waiting:
            clock("input", lambda: output.backward(self.gradient))
        clock("weight", waiting.compute)
        return waiting


def measure(layers: int, hidden: int, tokens: int, repeats: int, checkpointing: Checkpointing) -> dict[str, Any]:
    """Seconds, FLOPs and bytes of one kind of activation checkpointing."""
    stack = Stack(layers, hidden, tokens, checkpointing)
    flops: dict[str, int] = {}

    def count(name: str, call: Callable[[], Any]) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = call()
        flops[name] = counter.get_total_flops()
        return result

    stack.whole(count)
    due = stack.gradients()
    stack.forget()
    stack.split(count)
    found = stack.gradients()
    if len(found) != len(due) or not all(map(torch.equal, found, due)):
        raise RuntimeError("halves and whole backward have different gradients")
    if flops["input"] + flops["weight"] != flops["backward"]:
        raise RuntimeError(f"halves and whole backward compute different things: {flops}")
    times: dict[str, list[float]] = {}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for _ in range(repeats):
        for way in (stack.whole, stack.split):
            stack.forget()
            way(clock)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    return {
        "checkpointing": checkpointing,
        "seconds": seconds,
        "gflops": {name: number / 1e9 for name, number in flops.items()},
        "halves_over_whole": statistics.median(
            (i + w) / b for i, w, b in zip(times["input"], times["weight"], times["backward"], strict=True)
        ),
        "weight_share": seconds["weight"] / (seconds["input"] + seconds["weight"]),
        "forward_mib": None if checkpointing == "selective" else kept_by_forward(stack) / 2**20,
        "between_mib": kept_between(stack) / 2**20,
    }


def kept_by_forward(stack: Stack) -> int:
    """Bytes that autograd saves in a forward for a whole backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stack.model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = stack.forward()
    del output
    return sum(storages.values())


def kept_between(stack: Stack) -> int:
    """Bytes kept for BACKWARD_WEIGHT."""
    stack.forget()
    with stack.linears.forward():
        output = stack.forward()
    with stack.linears.backward() as waiting:
        output.backward(stack.gradient)
    storages = [operand.untyped_storage() for _, operand in waiting.operands()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "split_backward.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    rows = [
        measure(options.layers, options.hidden, options.tokens, options.repeats, mode)
        for mode in get_args(Checkpointing)
    ]
    report = {
        "benchmark": "split_backward",
        "command": command("split_backward", argv),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
    }
    write_json(options.out, report)
    for row in rows:
        forward = "?" if row["forward_mib"] is None else f"{row['forward_mib']:.0f}"
        print(
            f"{row['checkpointing']:10} halves {row['halves_over_whole']:.3f} of a whole backward, weights "
            f"{row['weight_share']:.2f} of them; kept {forward} MiB by a forward, {row['between_mib']:.0f} MiB between "
            "the halves"
        )
    return report


if __name__ == "__main__":
    main()
