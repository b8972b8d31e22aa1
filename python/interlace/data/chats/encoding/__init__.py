"""Encoding of a chat: templates, tokens, processors, media. Sizes from file headers: `interlace.modalities`.

- `template`: answer spans in a rendered template. `tokens`: ids and targets. `media`: media tensors.
- `processor`: for whole checkpoints. `processor_parts`: parts of processors.
- `load`: tokenizers and processors of folders. `bpe`: a tokenizer for the stamps.
"""
