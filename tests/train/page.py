"""Helpers of test_page.py and of other tests."""

from __future__ import annotations

from interlace.train.report.facts import Facts, ModuleFacts

FACTS = Facts(
    [
        ModuleFacts("vision", "SiglipVisionModel", 2, 1000, 0),
        ModuleFacts("vision.projector", "MLPProjector", None, 100, 100),
        ModuleFacts("language_model", "LlamaForCausalLM", 4, 3000, 1500),
    ],
    [{"vision": "layers 0-1"}, {"language_model": "layers 0-3, replica 0 of 2"}],
    3,
    {"Python": "3.11.7"},
)
