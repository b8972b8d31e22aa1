"""Keys that `interlace train --elastic` refuses by name, and settings that it passes to supervisors."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.cli import main
from interlace.resilience.settings import Settings
from interlace.train.config.load import ConfigError, load
from interlace.train.elastic.config import check, settings_of

CONFIG = Path(__file__).parents[2] / "configs" / "digits.toml"


def test_the_section_is_what_nodes_agree_on() -> None:
    changes = ["resilience.nodes=6", "resilience.faults=2", "resilience.heartbeat=3.0", "resilience.ranks_per_node=2"]
    config = load(CONFIG, ["run.device='cpu'", *changes])
    check(config, source="here")
    assert settings_of(config) == Settings(nodes=6, faults=2, min_nodes=0, heartbeat=3.0, gather=60.0, ranks_per_node=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "parallel.language_model.shard='optimizer'",
            r"parallel\.language_model\.shard = 'optimizer'.*shard_ranks to language_model\.cp",
        ),
        ("parallel.language_model.pp=2", r"parallel\.language_model\.pp = 2"),
        ("parallel.language_model.tp=2", r"parallel\.vision\.tp = 1, but parallel\.language_model\.tp = 2"),
        ("parallel.vision.cp=2", r"parallel\.vision\.cp = 2, but parallel\.language_model\.cp = 1"),
        (
            "parallel={vision={tp=2}, language_model={tp=2}}",
            r"resilience\.ranks_per_node = 1 is no multiple of tp \* cp = 2",
        ),
        ("parallel.placement='replicated'", r"parallel\.placement = 'replicated'"),
        ("parallel.dp=2", r"parallel\.dp = 2, but --elastic .* leave it out"),
        ("parallel.vision.dp=2", r"parallel\.vision\.dp = 2, but --elastic .* leave it out"),
        ("parallel={placement='chain', ranks=2}", r"parallel\.placement = 'chain', but --elastic .* leave it out"),
        ("train.compile=true", r"train\.compile = true would compile anew"),
        ("train.offload_optimizer=true", r"train\.offload_optimizer = true .* compute on the CPU"),
        ("run.device='cuda'", r"run\.device = 'cuda'.*CPUs alone"),
        ("parallel='auto'", r"parallel\.layout = 'auto'"),
        (
            "train.batch_size=1",
            r"train\.batch_size = 1 is too small for train\.microbatches = 1 of each of 2 pipelines",
        ),
        ("resilience.faults=2", r"resilience\.nodes = 2 cannot hold 3 pipelines"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: str, words: str) -> None:
    config = load(CONFIG, [change])
    with pytest.raises(ConfigError, match=words):
        check(config, source=str(CONFIG))


def test_each_pipeline_has_a_packed_row() -> None:
    packed = "data={dataset='chats', train=['a.jsonl'], tokenizer='t', max_tokens=64, pack=true}"
    check(load(CONFIG, [packed, "train.batch_size=2", "train.microbatches=2"]), source="here")
    with pytest.raises(
        ConfigError, match=r"train\.batch_size = 1 is too small for a packed row of each of 2 pipelines"
    ):
        check(load(CONFIG, [packed, "train.batch_size=1"]), source="here")


def test_an_address_without_a_port_is_no_coordinator() -> None:
    with pytest.raises(ConfigError, match=r"resilience\.coordinator"):
        load(CONFIG, ["resilience.coordinator='10.0.0.5'"])


def test_coordinator_on_a_foreign_address_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "give an address of this machine as --host" in capsys.readouterr().err
