"""Estimates of time and memory: measured layers and links, counted FLOPs, the predicted step.

- `predictor`, `predict`: seconds of a step. `travel`: seconds of its messages. `step_flops`: FLOPs of a step.
- `profiling`, `timed_layers`: timed layers. `measured_links`, `thread_links`: timed links.
- `traced`: bytes that forwards keep; `identical_layers` are run once. `sample_sizes`: sizes of chunks from lengths.
"""
