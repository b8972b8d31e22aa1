"""Helpers of test_virtual_stages.py and of other tests."""

from __future__ import annotations

from interlace.layout import Layout, ParallelSpec
from tests.tiny import tiny_mllm

LLM = "language_model"


LOOP, V = {"pp": 2, "virtual": 2}, {"pp": 2, "virtual": 2, "order": "v"}


# placement, spec of the vision encoder, spec of the language model, other model options, other layout options
LAYOUTS = {
    "parallel": ("parallel", {}, LOOP, {}),
    "parallel, v, tied on one rank": ("parallel", {}, V, {"tied": True}),
    "parallel, tied on two ranks": ("parallel", {}, LOOP, {"tied": True}),
    "parallel, three laps, tied, dp": ("parallel", {"dp": 2}, {"pp": 2, "virtual": 3, "dp": 2}, {"tied": True}),
    "parallel, v, tied on one rank, dp": ("parallel", {"dp": 2}, {**V, "dp": 2}, {"tied": True}),
    "colocated, v in both": ("colocated", V, V, {}),
    "shared": ("shared", {"pp": 2}, LOOP, {"tied": True}),
    "shared, whole weights for a layer at a time": ("shared", {"dp": 2}, {"virtual": 2, "dp": 2, "shard": "full"}, {}),
    "replicated": ("replicated", {}, LOOP, {}),
    "parallel, one rank": ("parallel", {}, {"virtual": 4}, {}),
    "parallel, tp": ("parallel", {}, {**V, "tp": 2}, {"tied": True, "kv_heads": 2}),
    "parallel, optimizer's state shared": ("parallel", {"dp": 2}, {**LOOP, "dp": 2, "shard": "optimizer"}, {}),
}


def made(name):
    placement, vision, language, about = LAYOUTS[name]
    mllm = tiny_mllm(layers=6, **about)
    dp = language.get("dp", 1)
    specs = dict.fromkeys(mllm.modules_order(), ParallelSpec(**vision)) | {LLM: ParallelSpec(**language)}
    assert all(spec.dp == dp for spec in specs.values()) or placement == "shared"
    return mllm, Layout.from_specs(mllm, specs, placement=placement)
