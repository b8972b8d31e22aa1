"""Config of a run on own chats."""

CONFIG = """
[run]
name = "own"
folder = "{folder}/runs"

[model.vision]
architecture = "SiglipVisionModel"
downsample = 2

[model.vision.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
image_size = 32
patch_size = 8

[model.language_model]
architecture = "LlamaForCausalLM"

[model.language_model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 512

[data]
dataset = "chats"
train = ["{folder}/train.jsonl"]
validation = ["{folder}/validation.jsonl"]
tokenizer = "{folder}/tokenizer"
cache = "{folder}/cache"
max_image_tokens = 32
max_tokens = 160

[train]
steps = 2
batch_size = 4
microbatches = 2
warmup_steps = 1
validation_samples = 4

[parallel]
ranks = 1

[log]
every = 1
trackers = []
trace_step = 0
samples = 3
max_new_tokens = 4

[checkpoint]
asynchronous = false
"""
