"""Built-in chats: handwritten digits, and stamps with pictures and speech. Tokens without a tokenizer: bytes.

- `stamps_folder`: writes a folder of chats. `digits`, `stamps`, `stamps_media`: its records and files.
- `fetch`: Debian's package of stamps. `stamps_index`: its contents.
- `byte_tokenizer`: bytes as tokens. `baseline`: loss of a unigram model.
"""
