"""Checkpoints: written atomically, verified before use. Tensors are stored by their names in the one-process model.

- `checkpoints`: saves and loads them, on all ranks together. `folder`: which of a run's checkpoints are complete.
- `storage`: their files, safetensors and JSON, no pickle.
- `pieces`: parts of tensors under any cut, and the rank that writes each. `reading`: fills tensors.
- `base`: frozen weights stored elsewhere.
- `identity`: the model of a checkpoint. `generators`: states of random generators.
"""
