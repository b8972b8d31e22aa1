"""Faults in runs and checkpoints, and in commands that use them."""

from __future__ import annotations

import json
from typing import Any

from tests.train.faults import Fault, Place

RESUME = "train --resume {run}"


def _newest_cut(at: Place) -> None:
    at.cut(f"{at.checkpoint(2)}/rank-00000.safetensors")


def _all_cut(at: Place) -> None:
    _newest_cut(at)
    at.cut(f"{at.checkpoint(1)}/rank-00000.safetensors")


def _manifest(at: Place, **values: Any) -> None:
    at.table(f"{at.checkpoint(2)}/manifest.json", **values)


def _grown(found: dict[str, Any]) -> dict[str, Any]:
    last = max(token["id"] for token in found["added_tokens"])
    most = max([last, *found["model"]["vocab"].values()])
    more = {**found["added_tokens"][0], "id": most + 1, "content": "<|more|>"}
    return {**found, "added_tokens": [*found["added_tokens"], more]}


RUNS = [
    Fault("a half-written newest checkpoint", RESUME, ("using the checkpoint before it",), _newest_cut, code=0),
    Fault(
        "no complete checkpoint",
        RESUME,
        (
            "no checkpoint in ",
            "is whole; start the run without --resume",
        ),
        _all_cut,
    ),
    Fault(
        "a cut-off checkpoint that is named",
        RESUME + "/checkpoints/step-00000002",
        (
            "step-00000002 is torn: ",
            "bytes instead of ",
        ),
        _newest_cut,
    ),
    Fault(
        "a checkpoint without manifest",
        RESUME + "/checkpoints/step-00000002",
        (
            "step-00000002 is torn: ",
            "manifest.json is missing",
        ),
        lambda at: at.remove(f"{at.checkpoint(2)}/manifest.json"),
    ),
    Fault(
        "a manifest that is no JSON",
        RESUME + "/checkpoints/step-00000002",
        (
            "step-00000002 is torn: ",
            "manifest.json is damaged",
        ),
        lambda at: at.cut(f"{at.checkpoint(2)}/manifest.json"),
    ),
    Fault(
        "a manifest of another version",
        RESUME + "/checkpoints/step-00000002",
        (
            "step-00000002 is torn: ",
            "manifest.json is damaged",
        ),
        lambda at: _manifest(at, version=99),
    ),
    Fault(
        "a pickle in the place of tensors",
        RESUME + "/checkpoints/step-00000002",
        (
            "step-00000002 is torn: ",
            "has 25 bytes instead of ",
        ),
        lambda at: at.write(f"{at.checkpoint(2)}/rank-00000.safetensors", b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    ),
    Fault(
        "another model",
        RESUME + " --set model.vision.config.hidden_size=32 --set train.steps=3",
        (
            "is a checkpoint of another model: model.vision.config.hidden_size is 16 in the checkpoint, 32",
            "Use the config.toml of its run",
        ),
    ),
    Fault(
        "another batch size",
        RESUME + " --set train.batch_size=2 --set train.steps=3 --set train.schedule_steps=2",
        (
            "the saved loader state has batch_size = 4, this run 2",
            "resume with the same data settings",
        ),
    ),
    Fault(
        "other data",
        RESUME + " --set train.steps=3 --set train.schedule_steps=2",
        (
            "the saved loader state has dataset_size = 8, this run 9",
            "resume with the same data settings",
        ),
        lambda at: at.record(("user", "one more?"), ("assistant", "yes")),
    ),
    Fault(
        "fewer steps than are done",
        RESUME + " --set train.steps=1 --set train.warmup_steps=0",
        ("is of step 2, but train.steps = 1; raise it, or go on from an earlier checkpoint",),
    ),
    Fault(
        "more steps without a plan", RESUME + " --set train.steps=9", ("--set train.schedule_steps=2 keeps the plan",)
    ),
    Fault(
        "a run without a checkpoint",
        RESUME,
        (
            "no checkpoint under ",
            "start without --resume",
        ),
        lambda at: (at.remove(at.checkpoint(1)), at.remove(at.checkpoint(2))),
    ),
    Fault("a run that is not there", "train --resume {at}/gone", ("--resume {at}/gone: there is no such folder",)),
    Fault(
        "a folder that is no run",
        "train --resume {at}/pictures",
        ("not a run folder (no config.toml); name one, or the config as well",),
    ),
    Fault(
        "a run without a config",
        RESUME,
        ("not a run folder (no config.toml); name one, or the config as well",),
        lambda at: at.remove(f"{at.run.relative_to(at.at)}/config.toml"),
    ),
    Fault(
        "a run whose config is broken",
        RESUME,
        ("config.toml: not valid TOML",),
        lambda at: at.cut(f"{at.run.relative_to(at.at)}/config.toml"),
    ),
    Fault(
        "a step that is not there",
        "generate {run} --text a --step 7",
        ("has no checkpoint of that step; it has 1, 2",),
    ),
    Fault(
        "an answer from a cut-off checkpoint",
        "generate {run} --text a --step 2",
        ("step-00000002 is torn: ",),
        _newest_cut,
    ),
    Fault("an answer from no run", "generate {at}/pictures --text a", ("pictures: not a run folder (no config.toml)",)),
    Fault("nothing asked", "generate {run}", ("nothing to answer: give --image, --video, --audio or --text",)),
    Fault("a picture that is not there", "generate {run} --image {at}/gone.png", ("gone.png: no such file",)),
    Fault(
        "speech that the model does not hear",
        "generate {run} --audio {at}/train.jsonl",
        (
            "train.jsonl: ",
            "Format not recognised",
        ),
    ),
    Fault("a folder as picture", "generate {run} --image {at}/pictures", ("pictures: a folder, not a file",)),
    Fault(
        "a prompt longer than the model",
        "generate {run} --text '" + "word " * 600 + "'",
        (
            "the prompt is 1811 tokens long",
            "give less",
        ),
    ),
    Fault(
        "export into a folder that holds something",
        "export {run} {at}/pictures",
        ("pictures exists and is not empty: name a new folder",),
    ),
    Fault(
        "export over a file",
        "export {run} {at}/train.jsonl",
        ("train.jsonl exists and is not empty: name a new folder",),
    ),
    Fault(
        "export below a file",
        "export {run} {at}/train.jsonl/out",
        (
            "export to {at}/train.jsonl/out: ",
            "File exists",
        ),
    ),
    Fault("export of no run", "export {at}/pictures {at}/out", ("pictures: not a run folder (no config.toml)",)),
    Fault(
        "export of a run without a checkpoint",
        "export {run} {at}/out",
        ("no complete checkpoint in ",),
        lambda at: (at.remove(at.checkpoint(1)), at.remove(at.checkpoint(2))),
    ),
    Fault(
        "export of a cut-off checkpoint", "export {run} {at}/out --step 2", ("step-00000002 is torn: ",), _newest_cut
    ),
    Fault(
        "export of a step that is not there",
        "export {run} {at}/out --step 9",
        ("has no checkpoint of that step; it has 1, 2",),
    ),
    Fault(
        "--adapter without LoRA", "export {run} {at}/out --adapter", ("has trained none ([train.lora]): leave it out",)
    ),
    Fault(
        "--raw without averages",
        "export {run} {at}/out --raw",
        ("has no averaged weights (train.ema): omit --raw",),
    ),
    Fault(
        "a run whose tokenizer is gone",
        "export {run} {at}/out",
        ("tokenizer: no such folder; name one with a tokenizer as data.tokenizer",),
        lambda at: at.remove("tokenizer"),
    ),
    Fault(
        "a tokenizer that has grown",
        "generate {run} --text a",
        ("is a checkpoint of another model: language_model.model.embed_tokens.weight is float32[370",),
        lambda at: at.write(
            "tokenizer/tokenizer.json", json.dumps(_grown(json.loads((at.at / "tokenizer/tokenizer.json").read_text())))
        ),
    ),
    Fault(
        "--step of one checkpoint",
        "export {run}/checkpoints/step-00000002 {at}/out --step 1",
        ("step-00000002 is one checkpoint already",),
    ),
    Fault(
        "crash records of a run that did not fail",
        "doctor crash {run}",
        ("holds no rank-N.json, which the ranks of a run leave when it fails",),
    ),
]
