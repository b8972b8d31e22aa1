"""Chats with media, in common file formats (records, folders, tars): encoded, checked and shown.

- `files/`: records on disk. `encoding/`: tokens, targets and media of a chat.
- `store`: cache of prepared chats. `dataset`: samples. `stream`: samples in order. `examine`: `interlace data check`.
- `page`: a page that shows samples as the model sees them.
"""
