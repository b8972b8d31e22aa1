"""Local paths: rejects URLs, which Python would treat as a relative folder named "s3:"."""

import re

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(text: str) -> str:
    """Returns `text`. Raises ValueError with a correction if it is a URL."""
    scheme = URL.match(text)
    if scheme is None:
        return text
    if scheme[1].lower() == "file":
        instead = f"write {re.sub(r'^[A-Za-z]+:/+', '/', text)!r}"
    else:
        instead = "mount that store, or copy its files, and give the local path"
    raise ValueError(f"{text!r} is a URL, and only local paths are read and written: {instead}")
