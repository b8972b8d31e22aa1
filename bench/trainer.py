"""`interlace train` against a plain PyTorch loop: the same modules, data and batches on the same cores, in one run.

    plain    a user's loop without interlace: HuggingFace modules with SDPA, samples padded to the longest of the batch,
             images of one size together, speech padded to Whisper's length, AdamW and clipping, one process
    packed   the same loop around a MultimodalModel: one packed row, bitfield attention, no runtime
    the rest `interlace train`, on 1 to 3 ranks, by placement and number of microbatches

The model of configs/stamps.toml (1.6 M parameters) and two larger ones train on its data. Each layout trains in its own
processes, round after round, so that all run under the same load. A figure is the median over rounds of tokens (of the
language model, without padding) per second of a step, from loading the batch to the update. The report is written after
each size. Sizes of --out from this machine and these versions are kept if they are not measured now.

    python -m bench.trainer [--sizes 1.6M 37M 150M] [--rounds 3] [--dataset digits] [--out bench/results/trainer.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.measure import command, machine, versions, write_json
from interlace.model import MultimodalModel, Sample
from interlace.model.language import merge_tokens
from interlace.model.loss import cross_entropy_sum
from interlace.model.projector import stack_tokens
from interlace.model.sample import IGNORE
from interlace.train.config import load as configs
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, datasets, prepare
from interlace.train.data.texts import tokenizer_of, vocabulary_of
from interlace.train.launch import launcher
from interlace.train.models.build import build, materialize
from interlace.train.models.tuning import rates
from interlace.train.optim import Optimizer
from interlace.train.report.metrics import LOSS

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "stamps.toml"
SIZES: dict[str, list[str]] = {
    "1.6M": [],
    "37M": [
        *("language_model.hidden_size=512", "language_model.intermediate_size=1408"),
        *("language_model.num_hidden_layers=8", "language_model.num_attention_heads=8"),
        *("language_model.num_key_value_heads=4", "vision.hidden_size=384", "vision.intermediate_size=1536"),
        *("vision.num_hidden_layers=6", "vision.num_attention_heads=6"),
    ],
    "150M": [
        *("language_model.hidden_size=1024", "language_model.intermediate_size=2816"),
        *("language_model.num_hidden_layers=10", "language_model.num_attention_heads=16"),
        *("language_model.num_key_value_heads=8", "vision.hidden_size=512", "vision.intermediate_size=2048"),
        *("vision.num_hidden_layers=8", "vision.num_attention_heads=8"),
    ],
}
STEPS = {"1.6M": 14, "37M": 8, "150M": 5}  # of a round
WARM = 2  # of them, not counted
LAYOUTS: dict[str, list[str]] = {
    "1 rank": ["parallel.ranks=1"],
    "encoders | language model": [],
    "replicated, language model in 2": ['parallel.placement="replicated"', "parallel.language_model.pp=2"],
    "chain in 2": ['parallel.placement="chain"', "parallel.ranks=2"],
    "2 replicas": ["parallel.ranks=1", "parallel.dp=2"],
    "shared: encoders twice, language model in 2": [
        *('parallel.placement="shared"', "parallel.language_model.pp=2"),
        *("parallel.vision.dp=2", "parallel.audio.dp=2"),
    ],
    "encoders | 2 language models": ["parallel.language_model.dp=2"],
}
DIGITS = ROOT / "build" / "bench-digits"
DATA = {
    "stamps": [],
    # Pictures of one token: the plain loop is causal, and the tokens of a picture attend to each other in Interlace.
    "digits": [
        *('data.prepare="digits"', 'data.options={side=16, looks=1, byte_encoders=["vision", "audio"]}'),
        *(f'data.train=["{DIGITS}/train.jsonl"]', f'data.validation=["{DIGITS}/validation.jsonl"]'),
        f'data.tokenizer="{DIGITS}/tokenizer"',
    ],
}
MICROBATCHES = (1, 2, 4, 8)
LOOPS = ("plain", "packed")


# ---------------------------------------------------------------------- the loops


class Step(NamedTuple):
    """One step of training: its loss in nats per target, its speed."""

    loss: float
    tokens_per_s: float


class Plain:
    """Loss of a list of samples by the modules of a MultimodalModel alone, run as in their library."""

    def __init__(self, mllm: MultimodalModel, attention: str = "sdpa") -> None:
        self.mllm, self.device = mllm, next(mllm.parameters()).device
        for encoder in mllm.encoders.values():
            encoder.module.set_attn_implementation("sdpa")
        language_model: Any = mllm.language_model
        language_model.set_attn_implementation(attention)

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """Mean cross entropy over all targets, in nats."""
        features = {name: self._encode(name, samples) for name in self.mllm.encoders}
        longest = max(len(sample.input_ids) for sample in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        labels, attended = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            length = len(sample.input_ids)
            ids[row, :length], labels[row, :length], attended[row, :length] = sample.input_ids, sample.labels, 1
        return self._loss(features, ids, labels, attention_mask=attended)

    def _loss(self, features: dict[str, Tensor | None], ids: Tensor, labels: Tensor, **masks: Tensor) -> Tensor:
        targets, ids, labels = int((labels != IGNORE).sum()), ids.to(self.device), labels.to(self.device)
        language_model: Any = self.mllm.language_model
        embeds = language_model.get_input_embeddings()(ids)
        inputs = {"input_ids": ids, "inputs_embeds": embeds, "placeholders": self.mllm.placeholders}
        merged = merge_tokens({name: rows for name, rows in features.items() if rows is not None}, inputs)
        given = {name: mask.to(self.device) for name, mask in masks.items()}
        output = language_model(inputs_embeds=merged["inputs_embeds"], use_cache=False, **given)
        return cross_entropy_sum(output.logits, labels) / targets

    def _encode(self, name: str, samples: Sequence[Sample]) -> Tensor | None:
        """Features of all items in order, [n, D]; None for no items. Images of one shape are batched."""
        encoder: Any = self.mllm.encoders[name]
        items = [item for sample in samples for item in sample.media.get(name, ())]
        if not items:
            return None
        pieces: dict[int, Tensor] = {}
        if name == "audio":
            batch = torch.zeros(len(items), *encoder.default_shape)
            for row, item in zip(batch, items):
                row[:, : item.shape[1]] = item.data
            hidden = encoder.module(batch.to(self.device)).last_hidden_state
            pieces = {i: hidden[i, : encoder.encoder_length(item.shape)] for i, item in enumerate(items)}
        else:
            groups: dict[tuple[int, ...], list[int]] = {}
            for i, item in enumerate(items):
                groups.setdefault(item.shape, []).append(i)
            for members in groups.values():
                batch = torch.stack([items[i].data for i in members]).to(self.device)
                hidden = encoder.module(batch, interpolate_pos_encoding=True).last_hidden_state
                pieces.update(zip(members, hidden))
        rows = [pieces[i] for i in range(len(items))]
        features: Tensor = encoder.projector(stack_tokens(torch.cat(rows), [len(x) for x in rows], encoder.downsample))
        return features


class InRows(Plain):
    """The same with samples packed in one row; HuggingFace's attention separates them by positions."""

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """Mean cross entropy over all targets, in nats."""
        features = {name: self._encode(name, samples) for name in self.mllm.encoders}
        ids, labels = (torch.cat([getattr(sample, key) for sample in samples])[None] for key in ("input_ids", "labels"))
        positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
        return self._loss(features, ids, labels, position_ids=positions)


def packed(mllm: MultimodalModel) -> Callable[[Sequence[Sample]], Tensor]:
    """Loss by the MultimodalModel itself."""

    def loss(samples: Sequence[Sample]) -> Tensor:
        output: Tensor = mllm(**mllm.collate(samples)).loss
        return output

    return loss


def train(loop: str, config: Config) -> list[Step]:
    """Train with a loop in one process."""
    torch.set_num_threads(launcher.default_threads(1))
    torch.manual_seed(config.run.seed)
    tokenizer = tokenizer_of(config)
    mllm = build(config, tokenizer)
    materialize(mllm, seed=config.run.seed)
    splits = datasets(config, mllm, tokenizer)
    feed = Feed(*splits, batch_size=config.train.batch_size, seed=config.run.seed, validation_samples=1)
    parameters = list(mllm.parameters())
    optimizer = Optimizer(mllm.named_parameters(), config, rates(config, mllm))
    loss_of = Plain(mllm) if loop == "plain" else packed(mllm)
    steps = []
    for step in range(1, config.train.last_step + 1):
        began = time.perf_counter()
        batch = feed.next()
        loss = loss_of(batch.samples)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)
        optimizer.step(step)
        value = float(loss)
        steps.append(Step(value, batch.tokens / (time.perf_counter() - began)))
    feed.close()
    return steps


# ---------------------------------------------------------------------- processes


def config_of(
    size: str, layout: Sequence[str] = (), microbatches: int = 1, folder: str = "runs", steps: int = 1,
    dataset: str = "stamps",
) -> Config:  # fmt: skip
    """The config of a short run: no validation, no page, every step logged."""
    model = [f"model.{module}.config.{rest}" for module, _, rest in (x.partition(".") for x in SIZES[size])]
    rest = ["log.every=1", "log.trace_step=0", "log.samples=0", "log.accuracy_samples=0", "log.trackers=[]"]
    rest += [f"run.folder={json.dumps(folder)}", "checkpoint.every=0", *DATA[dataset]]
    rest += [f"train.steps={steps}", f"train.microbatches={microbatches}", "train.warmup_steps=0"]
    rest += ["train.schedule_steps=450", "train.validate_every=0", "train.validation_samples=2"]
    apart = "parallel={placement='colocated', timeout=60.0}"  # otherwise the config would choose
    return configs.load(CONFIG, [*model, apart, *layout, *rest, "run.device=cpu"])  # same device as the plain loops


def run(name: str, config: Config) -> list[Step]:
    """The steps of a loop, or those in the metrics of `interlace train`, in separate processes."""
    folder = Path(config.run.folder)
    path = folder / "config.toml"
    path.write_text(configs.dumps(config))
    module = ["bench.trainer", "--loop", name] if name in LOOPS else ["interlace", "train"]
    done = subprocess.run([sys.executable, "-m", *module, str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    if name in LOOPS:
        return [Step(*step) for step in json.loads(done.stdout)]
    [metrics] = [each for each in folder.glob("*/*/metrics.jsonl") if not each.parent.is_symlink()]
    return [Step(line[LOSS], line["throughput(tps)"]) for line in map(json.loads, metrics.read_text().splitlines())]


# ---------------------------------------------------------------------- the report


def measure(size: str, rounds: int, steps: int, microbatches: Sequence[int], dataset: str) -> dict[str, Any]:
    """A report on one size: a row for each loop and layout."""
    cases: list[tuple[str, int]] = [(loop, 1) for loop in LOOPS]
    cases += [(layout, n) for layout in LAYOUTS for n in microbatches]
    result: dict[tuple[str, int], list[list[Step]]] = {case: [] for case in cases}
    # The first run is not counted: the system may be slow to provide memory that was not used before.
    for counted, (name, n) in [(False, cases[1]), *((True, case) for _ in range(rounds) for case in cases)]:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(size, LAYOUTS.get(name, ()), n, folder, steps, dataset)
            prepare(config, lambda line: print(line, file=sys.stderr))
            ran = run(name, config)
        if not counted:
            continue
        result[name, n].append(ran)
        print(f"{size} {name}, {n}: {speed(ran):,.0f} tokens/s", file=sys.stderr, flush=True)
    plain = statistics.median(speed(ran) for ran in result["plain", 1])
    first = result["packed", 1][0][0].loss
    rows = []
    for (name, n), runs in result.items():
        speeds = sorted(speed(ran) for ran in runs)
        loss = runs[0][0].loss
        if name != "plain" and abs(loss - first) > 1e-4 * abs(first):  # plain: Whisper attends its padding
            raise RuntimeError(f"{name}, {n} microbatches: the first step's loss is {loss}, not {first}")
        row = {
            "loop": name,
            "microbatches": n,
            "tokens_per_s": statistics.median(speeds),
            "slowest": speeds[0],
            "fastest": speeds[-1],
            "times_plain": statistics.median(speeds) / plain,
            "first_loss": loss,
        }
        rows.append(row)
    return {"size": size, "parameters": parameters_of(size), "steps": steps, "rounds": rounds, "rows": rows}


def speed(ran: Sequence[Step]) -> float:
    """Tokens per second of a round: the median over its steps after warm-up."""
    return statistics.median(step.tokens_per_s for step in ran[WARM:])


def parameters_of(size: str) -> int:
    config = config_of(size)
    return sum(parameter.numel() for parameter in build(config, vocabulary_of(config)).parameters())


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"of a round; default: {STEPS}")
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(MICROBATCHES))
    parser.add_argument("--dataset", choices=DATA, default="stamps")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "trainer.json")
    parser.add_argument("--loop", nargs=2, metavar=("LOOP", "CONFIG"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.loop:
        print(json.dumps(train(options.loop[0], configs.load(options.loop[1]))))
        return None
    report: dict[str, Any] = {"benchmark": "trainer", "machine": machine(), "versions": versions(), "sizes": []}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if (before["machine"], before["versions"]) == (report["machine"], report["versions"]):
            report["sizes"] = before["sizes"]
    for size in options.sizes:
        part = measure(size, options.rounds, options.steps or STEPS[size], options.microbatches, options.dataset)
        parts = {each["size"]: each for each in [*report["sizes"], {"command": command("trainer", argv), **part}]}
        report["sizes"] = [parts[each] for each in SIZES if each in parts]
        write_json(options.out, report)
    print_table(report)
    return report


def print_table(report: dict[str, Any]) -> None:
    for part in report["sizes"]:
        print(f"\n{part['size']}: {part['parameters']:,} parameters, tokens/s (times the plain loop)")
        for row in part["rows"]:
            what = row["loop"] if row["loop"] in LOOPS else f"{row['loop']}, {row['microbatches']} microbatches"
            print(f"  {what:48} {row['tokens_per_s']:8,.0f}  {row['times_plain']:.2f}")


if __name__ == "__main__":
    main()
