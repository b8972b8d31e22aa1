"""Chats on disk: formats of records, their keys, indexes, tars and folders of pictures.

- `records`: files of records. `sources`: record to chat. `picture_folder`, `tar`. `keys`: the table of keys.
- `shapes`: record formats to one chat type. `index`: offsets of large data, made by `index_pool` and `index_worker`.
"""
