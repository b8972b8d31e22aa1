"""Config of a tiny run, shared by tests of the command line."""

from __future__ import annotations

TINY = """
[run]
name = "tiny"
folder = "{folder}"
[model.vision]
architecture = "SiglipVisionModel"
config = {{ hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2, image_size = 8, patch_size = 4 }}
[model.language_model]
architecture = "LlamaForCausalLM"
config = {{ hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 64, tie_word_embeddings = true }}
[data]
dataset = "tests.digits:Digits"
workers = 0
max_tokens = 14
cache = "{folder}/cache"
[train]
steps = 6
batch_size = 8
microbatches = 2
warmup_steps = 2
lr = 5e-3
validate_every = 3
validation_samples = 8
[parallel]
placement = "colocated"
threads = 1
timeout = 20.0
[checkpoint]
every = 2
[log]
every = 1
trace_step = 3
trackers = []
samples = 4
max_new_tokens = 6
accuracy_samples = 16
"""  # noqa: E501  (inline tables of TOML are one line)
