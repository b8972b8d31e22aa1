"""Built-in datasets: handwritten digits, stamps with pictures and speech, and their byte tokenizer.

- `digits`: samples. `base`, `byte_tokenizer`: shared by the datasets. `baseline`: loss of a unigram model.
- `fetch`: Debian's package of stamps. `stamps_index`: its contents. `stamps`, `stamps_media`: records and files.
- `stamps_folder`: the stamps as chats. `digits_as_stamps`: an offline substitute.
"""
