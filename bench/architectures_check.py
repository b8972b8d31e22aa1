"""Check of one architecture for `bench.architectures`: MultimodalModel against the model by itself.

The oracle is the model's own eager attention on one whole sample (or one item) at a time. Compared are:

- the outputs and the gradient of every parameter, of several samples in one batch;
- the same, cut into stages at every layer;
- greedy generation of several prompts at once;
- the drop-in attention under a plan that a user passes.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import interlace
from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, carrier, use_plan
from interlace.masks import BitfieldMask
from interlace.model import Media, ModalityModule, MultimodalModel, Sample, generate
from interlace.model.inputs.base import Item
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.patches import PatchInputs

LENGTHS = (9, 13, 6)  # longer than the window and the chunk of a tiny config
NEW_TOKENS = 4
PACKAGE = Path(interlace.__file__).parent
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3  # relative, in fp32


class Wrong(Exception):
    """The result differs from the oracle's; the message says where and by how much."""


def spread(model: nn.Module, outputs: Callable[[], list[Tensor]], seed: int = 0) -> None:
    """Move every weight away from its initial value, so that each of them matters, while `outputs` stay finite.

    Raises ValueError if the outputs are never finite.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for scale in (0.2, 0.1, 0.03, 0.0):
        model.load_state_dict(before)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn(parameter.shape, generator=g) * scale)
            if all(bool(x.isfinite().all()) and float(x.std()) > 1e-6 for x in outputs()):
                return
    raise ValueError("its outputs are not finite with random weights")


# ---------------------------------------------------------------------- language models


def spread_language(model: nn.Module) -> None:
    """`spread`, judged by the logits of the samples."""
    ids = prompts(model)
    spread(model, lambda: [eager_logits(model, row) for row in ids])


def prompts(model: nn.Module, seed: int = 0) -> list[Tensor]:
    """Token ids of samples, without the model's special ids."""
    config: Any = model.config
    taken = special_ids(config)
    plain = torch.tensor([token for token in range(3, int(config.get_text_config().vocab_size)) if token not in taken])
    g = torch.Generator().manual_seed(seed)
    return [plain[torch.randint(len(plain), (n,), generator=g)] for n in LENGTHS]


def samples_of(ids: list[Tensor]) -> list[Sample]:
    """A sample from each row of ids; every third position has no target."""
    made = []
    for number, row in enumerate(ids):
        labels = row.roll(-1).clone()
        labels[number % 3 :: 3] = -100
        labels[-1] = -100
        made.append(Sample(row, labels, name=f"sample {number}"))
    return made


def eager_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [T, V] of a sample alone. Raises ValueError for a model that computes no logits from its ids."""
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in _parameters(model) else {}
    logits: Tensor = model(input_ids=ids[None], **options).logits[0]
    if len(logits) != len(ids):
        raise ValueError(f"it gives {len(logits)} logits for {len(ids)} ids")
    return logits


def check_language(model: nn.Module, found: dict[str, Any], *, thorough: bool = True) -> None:
    """Fill `found` with the results of a language model with eager attention.

    Raises Wrong, or the model's own exception in the forward or backward of a batch.
    """
    eager = copy.deepcopy(model)
    ids = prompts(model)
    batch = samples_of(ids)
    count = sum(int((one.labels != -100).sum()) for one in batch)
    expected = [eager_logits(eager, row) for row in ids]
    total = torch.stack(
        [nn.functional.cross_entropy(x, one.labels, reduction="sum") for x, one in zip(expected, batch)]
    ).sum()
    (total / count).backward()
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters()}

    mllm = MultimodalModel({}, model).eval()
    inputs = mllm.collate(batch)
    found["layout"] = mllm.packing["language_model"]
    output = mllm(**inputs)
    compare("logits", by_sample(output.logits, inputs), expected)
    assert output.loss is not None
    compare("loss", [output.loss[None]], [total[None] / count])
    output.loss.backward()
    compare_gradients(_gradients(mllm), wanted)
    if thorough:
        attempt(found, "cut", lambda: check_language_cuts(mllm, batch, total.detach(), wanted, count))
        attempt(found, "generate", lambda: check_generation(mllm, eager, batch))
        attempt(found, "dropin", lambda: check_dropin(eager, ids[1], expected[1].detach()))


def _gradients(mllm: MultimodalModel) -> dict[str, Tensor | None]:
    """Gradients of the language model, by its own parameter names."""
    return {name: parameter.grad for name, parameter in mllm.language_model.named_parameters()}


def by_sample(logits: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    """Logits of each sample [T, V] from a batch of either layout."""
    valid = inputs["mask"].doc >= 0
    return list(logits[valid].split(LENGTHS))


def check_language_cuts(mllm: Any, batch: list[Sample], total: Tensor, wanted: Any, count: int) -> str:
    """Two stages at every layer: the summed loss and all gradients."""
    layers = len(mllm.layer_list("language_model"))
    inputs = {**mllm.collate_module("language_model", batch), "features": {}}
    refusals = []
    for cut in range(1, layers):
        mllm.zero_grad()
        try:
            stages = [mllm.slice("language_model", 0, cut), mllm.slice("language_model", cut, layers)]
            hidden = stages[0](inputs)
            result = stages[1](inputs, hidden)
        except ValueError as error:
            if not is_refusal(error):
                raise
            refusals.append(f"at {cut}: {first_line(error)}")
            continue
        compare(f"loss cut at {cut}", [result.detach()[None]], [total[None]])
        (result / count).backward()
        compare_gradients(_gradients(mllm), wanted, f"cut at {cut}: ")
    return _summary(refusals, layers - 1)


def _summary(refusals: list[str], cuts: int) -> str:
    if not cuts:
        return "a single layer"
    if len(refusals) == cuts:
        return f"refused {refusals[0]}"
    return f"right but for {len(refusals)} of {cuts} refused, {refusals[0]}" if refusals else "right"


def check_generation(mllm: MultimodalModel, eager: nn.Module, batch: list[Sample]) -> str:
    """Greedy generation for all samples at once."""
    with torch.no_grad():
        answers = []
        for one in batch:
            ids = one.input_ids
            for _ in range(NEW_TOKENS):
                ids = torch.cat([ids, eager_logits(eager, ids)[-1].argmax()[None]])
            answers.append(ids[len(one) :].tolist())
    result = generate(mllm, batch, max_new_tokens=NEW_TOKENS)
    if result != answers:
        raise Wrong(f"generated {result}, by itself {answers}")
    return "right"


def check_dropin(eager: nn.Module, ids: Tensor, expected: Tensor) -> str:
    """The model under a causal plan, by `carrier` and by `use_plan`."""
    model = copy.deepcopy(eager)
    model.set_attn_implementation(NAME)
    plan = AttentionPlan.build(BitfieldMask.causal(1, len(ids)))
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in _parameters(model) else {}
    outcomes = []
    for name in ("carrier", "use_plan"):
        try:
            with torch.no_grad(), use_plan(plan if name == "use_plan" else None):
                mask = carrier(plan) if name == "carrier" else None
                logits = model(input_ids=ids[None], attention_mask=mask, **options).logits[0]
        except ValueError as error:
            if not is_refusal(error):
                raise
            outcomes.append(f"{name} refused: {first_line(error)}")
            continue
        compare(f"drop-in by {name}", [logits], [expected])
        outcomes.append(f"{name} right")
    return "; ".join(outcomes)


# ---------------------------------------------------------------------- encoders


def spread_encoder(model: nn.Module, geometry: ModalityModule) -> list[Media]:
    """`spread`, judged by the features of random items of several sizes; returns these items."""
    g = torch.Generator().manual_seed(1)
    items = [
        Media(one.shape, geometry.tokens(*one), torch.randn(one.shape, generator=g), about=one.about)
        for one in items_for(geometry)
    ]
    spread(model, lambda: [eager_features(model, geometry, item) for item in items])
    return items


def items_for(geometry: ModalityModule) -> list[Item]:
    """Items of several sizes, if the encoder supports them; the first and the last are identical."""
    feed, default = geometry.feed, geometry.default
    items = [default, default, default]
    if isinstance(feed, PatchInputs):
        videos = [feed.item(2, 4, 4)] if feed.videos else []
        return [feed.item(1, 8, 4), feed.item(1, 4, 12), *videos, feed.item(1, 8, 4)]
    if isinstance(feed, ImageInputs) and feed.any_size:
        items[1] = Item((feed.channels, 2 * feed.patch[0], 3 * feed.patch[1]))
    if isinstance(feed, ClipInputs) and feed.any_length:
        items[1] = feed.with_length(default.shape[feed.time] * 3 // 5)
    return items


def eager_features(model: nn.Module, geometry: ModalityModule, item: Media) -> Tensor:
    """Features [n, D] of an item alone, class tokens included."""
    return geometry.features_of(model(**geometry.kwargs_of([item])))[0]


def check_encoder(model: nn.Module, media: list[Media], found: dict[str, Any], *, thorough: bool = True) -> None:
    """As `check_language`, for a vision or audio tower and its items."""
    eager = copy.deepcopy(model)
    encoder = ModalityModule(model, projector=nn.Identity()).eval()
    encoder.connect(encoder.feature_size)
    expected = []
    for item in media:
        features = eager_features(eager, encoder, item)
        whole = len(features) == encoder.encoder_length(item.shape, item.about)
        expected.append(features[encoder.prefix :] if whole else features)
    inputs = encoder.collate(media)
    found["layout"] = encoder.packing
    features = encoder(**inputs)
    compare("features", list(features.split([one.tokens for one in media])), expected)
    weight = torch.randn(features.shape, generator=torch.Generator().manual_seed(5))
    (features * weight).sum().backward()
    (torch.cat(expected) * weight).sum().backward()
    compare_gradients(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in eager.named_parameters()},
    )
    if thorough:
        attempt(found, "cut", lambda: check_encoder_cuts(encoder, inputs, features.detach()))


def check_encoder_cuts(encoder: ModalityModule, inputs: dict[str, Any], expected: Tensor) -> str:
    """Two stages at every layer: the features."""
    sizes = {"hidden_size": encoder.feature_size, "intermediate_size": 8, "vocab_size": 64, "num_hidden_layers": 1}
    llm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    mllm = MultimodalModel({"encoder": encoder}, llm, placeholders={"encoder": 63}).eval()
    refusals = []
    for cut in range(1, encoder.num_layers):
        try:
            stages = [mllm.slice("encoder", 0, cut), mllm.slice("encoder", cut, encoder.num_layers)]
            features = stages[1](inputs, stages[0](inputs))
        except ValueError as error:
            if not is_refusal(error):
                raise
            refusals.append(f"at {cut}: {first_line(error)}")
            continue
        compare(f"features cut at {cut}", [features], [expected])
    return _summary(refusals, encoder.num_layers - 1)


# ---------------------------------------------------------------------- comparing


def attempt(found: dict[str, Any], what: str, check: Callable[[], str]) -> None:
    """Record the result of `check`, that it is wrong, or the exception that it raised."""
    try:
        found[what] = check()
    except Wrong as error:
        found[what] = f"WRONG: {error}"
    except Exception as error:
        found[what] = f"raised {type(error).__name__}: {first_line(error)}"


def compare(what: str, found: list[Tensor], expected: list[Tensor]) -> None:
    """Raise Wrong unless the tensors are equal up to rounding."""
    if [tuple(x.shape) for x in found] != [tuple(x.shape) for x in expected]:
        raise Wrong(f"{what}: shapes {[list(x.shape) for x in found]}, expected {[list(x.shape) for x in expected]}")
    for i, (got, want) in enumerate(zip(found, expected)):
        error = float((got.detach() - want.detach()).norm() / want.detach().norm().clamp_min(1e-12))
        if not error <= TOLERANCE:
            raise Wrong(f"{what}[{i}] off by {error:.1e}")


def compare_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], where: str = ""
) -> None:
    """Raise Wrong unless every parameter has the expected gradient; a missing gradient equals a zero gradient."""
    floor = 1e-3 * max((float(want.norm()) for want in expected.values() if want is not None), default=0.0)
    for name, want in expected.items():
        got = found.get(name)
        if want is None or got is None:
            if (want is None or float(want.norm()) <= floor) and (got is None or float(got.norm()) <= floor):
                continue
            raise Wrong(f"{where}gradient of {name}: {_there(got)}, expected {_there(want)}")
        error = float((got - want).norm()) / max(float(want.norm()), floor, 1e-12)
        if not error <= GRADIENT_TOLERANCE:
            raise Wrong(f"{where}gradient of {name} off by {error:.1e}")


def _there(gradient: Tensor | None) -> str:
    return "none" if gradient is None else "one"


def special_ids(config: Any) -> set[int]:
    """Special ids in a config, of the model itself and its parts."""
    result = set()
    for key, value in vars(config).items():
        if key.startswith("_"):
            continue
        if hasattr(value, "model_type"):
            result |= special_ids(value)
        elif "token" in key or key.endswith(("_id", "_index")):
            result |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int)}
    return result


def is_refusal(error: BaseException) -> bool:
    """True for a ValueError of interlace, False for one of the model."""
    return (
        isinstance(error, ValueError)
        and PACKAGE in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents
    )


def first_line(error: BaseException, limit: int = 300) -> str:
    """The first line of a message, shortened."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _parameters(model: nn.Module) -> Any:
    return inspect.signature(model.forward).parameters
