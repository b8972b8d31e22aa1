"""Encoding of a chat: templates, tokens, processors, media and their sizes.

- `template`: answer spans in a rendered template. `tokens`: ids and targets. `headers`: sizes from file headers.
- `processor`: for whole checkpoints. `processor_parts`: parts of processors. `media`, `video`: media tensors.
- `load`: tokenizers and processors of folders. `bpe`: a tokenizer for the stamps.
"""
