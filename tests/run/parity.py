"""Helpers of test_parity.py and of other tests."""

from __future__ import annotations

from interlace.layout import Layout, ParallelSpec

FREEZING = {
    "nothing": (),
    "encoders": ("vision", "vision.projector", "audio", "audio.projector"),
    "encoders but projectors": ("vision", "audio"),
    "language model": ("language_model",),
    "encoders and language model": ("vision", "audio", "language_model"),
    "all but one encoder": ("vision", "vision.projector", "language_model", "audio.projector"),
}


def oracle(mllm, microbatches):
    """Loss and gradients in one process, each parameter under all of its names."""
    samples = [sample for group in microbatches for sample in group]
    mllm.zero_grad()
    output = mllm(**mllm.collate(samples))
    if output.loss.requires_grad:  # no gradient if only encoders train and no sample has their modality
        output.loss.backward()
    return float(output.loss.detach()), {
        name: None if p.grad is None else p.grad.clone() for name, p in mllm.named_parameters(remove_duplicate=False)
    }


def assert_same_gradient(name, found, expected):
    if expected is None:
        assert found is None, f"{name} has a gradient in the pipeline but none in one process"
        return
    assert found is not None, f"{name} has no gradient in the pipeline"
    error = (found - expected).norm() / expected.norm().clamp_min(1e-12)
    scale = expected.norm()
    assert error <= 1e-5 or (found - expected).norm() <= 1e-9, f"{name}: relative error {error:.2e} (norm {scale:.2e})"


def make_layout(mllm, placement, ranks):
    """The language model is split in two if that leaves a stage for every rank; neighbours share the other ranks."""
    pp = dict.fromkeys(mllm.modules_order(), 1)
    if placement == "replicated":
        pp["language_model"] = ranks
    elif ranks == 3:
        pp["language_model"] = 2
    elif ranks == 2 and placement == "colocated":
        pp.update(dict.fromkeys(mllm.encoders, 2))
    specs = {name: ParallelSpec(pp=pp[name]) for name in mllm.modules_order()}
    return Layout.from_specs(mllm, specs, placement=placement, ranks=ranks)
