"""docs/from-other-trainers.md: its keys exist, and its config trains as described."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from interlace.model.patterns import is_adapter
from interlace.train.config.load import from_table
from tests.layering import ROOT
from tests.model.wholes import llava

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (ROOT / "docs" / "from-other-trainers.md").read_text()
REFERENCE = (ROOT / "docs" / "config-reference.md").read_text()


def sections() -> dict[str, set[str]]:
    """Section -> its keys."""
    parts = re.split(r"^## `\[+([\w.]+)\]+`$", REFERENCE, flags=re.M)[1:]
    names, tables = parts[::2], parts[1::2]
    return {name: set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) for name, table in zip(names, tables)}


def test_keys_that_the_tables_name_are_there():
    """Keys in the second column, which has ours."""
    ours = "\n".join(line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| "))
    named = re.findall(r"`((?:train|data|model|parallel|checkpoint|log)\.[\w.]+)", ours)
    keys = sections()
    assert len(named) > 40
    for name in named:
        section, _, key = name.rpartition(".")
        assert key in keys.get(section, ()) or name in keys, name


def test_the_config_trains_adapters_of_the_language_model_alone(tmp_path):
    pytest.importorskip("peft")
    from interlace.model import MultimodalModel
    from interlace.train.models.build import freeze

    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    table = tomllib.loads(text)
    llava().save_pretrained(tmp_path / "whole")
    table["model"]["path"] = str(tmp_path / "whole")
    config = from_table(table)
    with torch.device("meta"):
        model = MultimodalModel.of_whole(llava())
    freeze(config, model, "config")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(name.startswith("language_model.") and is_adapter(name) for name in trained)
    assert (config.train.epochs, config.train.batch_size, config.data.pack) == (3, 8, True)
