"""Checkpoints: written atomically, verified before use, tensors by their names in the one-process model.

checkpoints.py    saves and loads them, on all ranks together       folder.py     which of a run's are whole
storage.py        their files: safetensors and JSON, no pickle      saveplan.py   which tensors a rank writes
pieces.py         parts of tensors, under any cut                   identity.py   which model they are of
base.py           frozen weights that lie elsewhere               reading.py    fills tensors from both
generators.py     states of random generators
"""
