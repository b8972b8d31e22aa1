"""Helpers of test_trainer.py and of other tests."""

from __future__ import annotations

VARYING = ("throughput", "time_metrics", "memory", "busy", "bubble", "tflops", "mfu", "hfu")
