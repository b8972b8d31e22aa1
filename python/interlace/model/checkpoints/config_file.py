"""config.json of a saved model: the original file, in the format of the release that wrote it.

HuggingFace writes configs in the format of its own release. Older releases silently use defaults for unknown keys. For
example, transformers 4 ignores rope_parameters, so it would use another rotary base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG = "config.json"
ROTATION = "rope_parameters"
DTYPES = ("dtype", "torch_dtype")
UNSAID = {*DTYPES, "architectures", "transformers_version", "_name_or_path"}
"""Keys that do not affect the computation, or that every release rewrites."""

Table = dict[str, Any]


def copy_config(folder: Path, source: Path) -> bool:
    """Replace the config.json of `folder`, as saved by HuggingFace, by that of `source`, the model's original folder.

    Later changes of the config are included. Returns False, and changes nothing, if `source` has no equivalent
    config.json.
    """
    written = folder / CONFIG
    if not (source / CONFIG).is_file():
        return False
    theirs, text = (at.read_text(encoding="utf-8") for at in (written, source / CONFIG))
    try:
        table = json.loads(text)
        before, now = _read(source), _read(folder)
        kept = type(before) is type(now) and _change(table, _settings_of(before), _settings_of(now))
        if kept:
            _set_dtype(table, json.loads(theirs).get("dtype"))
            same = table == json.loads(text)
            written.write_text(text if same else json.dumps(table, indent=2) + "\n", encoding="utf-8")
            kept = _settings_of(_read(folder)) == _settings_of(now)
    except Exception:  # the library may raise anything for broken configs: its own file stays
        kept = False
    if not kept:
        written.write_text(theirs, encoding="utf-8")
    return kept


def for_transformers_5(folder: Path) -> list[Path]:
    """The config.json files in `folder` and its direct subfolders that only transformers 5 reads correctly."""
    files = [*folder.glob(CONFIG), *sorted(folder.glob(f"*/{CONFIG}"))]
    return [file for file in files if _has_rotation(json.loads(file.read_text(encoding="utf-8")))]


def _has_rotation(value: object) -> bool:
    return isinstance(value, dict) and (bool(value.get(ROTATION)) or any(map(_has_rotation, value.values())))


def _read(folder: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _settings_of(config: PretrainedConfig) -> Table:
    """The settings of a config that affect the computation."""

    def without(table: Table) -> Table:
        return {k: without(v) if isinstance(v, dict) else v for k, v in table.items() if k not in UNSAID}

    return without(json.loads(config.to_json_string(use_diff=False)))


def _change(table: Table, before: Table, now: Table) -> bool:
    """Write the differences into `table`. Returns False if `table` has no place for them."""
    for key, value in now.items():
        was = before.get(key)
        if value == was and key in before:
            continue
        if isinstance(value, dict) and isinstance(was, dict):
            if not isinstance(table.get(key), dict) or not _change(table[key], was, value):
                return False
        else:
            table[key] = value
    return True


def _set_dtype(table: Table, dtype: str | None) -> None:
    """Set the dtype of the weights wherever `table` has one."""
    for key, value in table.items():
        if key in DTYPES and isinstance(value, str) and dtype is not None:
            table[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
