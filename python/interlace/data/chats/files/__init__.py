"""Chats on disk: formats of records, their keys, indexes, tars and folders of pictures.

- `records`: file formats (JSON lines, JSON, parquet, datasets, tar) to records; a new suffix goes here. `tar`,
  `picture_folder`.
- `shapes`: record to chat, for the layouts `messages` and `conversations`. `keys`: keys that are read or refused.
- `sources`: decodes the JSON of a record and calls `shapes`; detects changed media.
- `index`: offsets of large data, made by `index_pool` and `index_worker`.
"""
