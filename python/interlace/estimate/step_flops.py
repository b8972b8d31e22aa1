"""FLOPs of a step, from the lengths of its samples: model FLOPs and executed FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from interlace.model import MultimodalModel, Sample, SampleOutline
from interlace.model.collate import JOINED
from interlace.model.counting.fake_run import Attends, Products, Uncountable
from interlace.model.counting.flops import Encoder, count_language
from interlace.model.counting.pairs import Document, Span, visible, visited
from interlace.model.inputs.placeholders import item_starts
from interlace.model.loss import at_once, head_of
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.rows import ALONE, PACKED, ROWS
from interlace.schedule import StepTable


class Flops(NamedTuple):
    """model: FLOPs that the mathematics needs (PaLM, arXiv 2204.02311, appendix B). executed: computed FLOPs, including
    recomputed layers, partly visible blocks, and padding; for a whole chunk, as if one rank had it."""

    model: int
    executed: int

    def plus(self, other: Flops) -> Flops:
        """The sum."""
        return Flops(self.model + other.model, self.executed + other.executed)


class StepFlops:
    """Counts FLOPs of the steps of a model with its current frozen weights, adapters and checkpointing.

    recompute: whether layers with a backward run their forward twice (checkpointing "full"). Raises Uncountable, with
    the reason, for a module whose products cannot be derived from lengths.
    """

    def __init__(self, mllm: MultimodalModel, *, recompute: bool = False) -> None:
        self.mllm, self.recompute = mllm, recompute
        try:
            self.encoders = {name: Encoder(mllm, name) for name in mllm.encoders}
            features = {name: encoder.output for name, encoder in self.encoders.items()}
            self._plain = count_language(mllm, {})
            trained = any(encoder.gradients for encoder in self.encoders.values())
            self._fed = count_language(mllm, features) if trained else self._plain
        except Uncountable:
            raise
        except Exception as error:  # a model that is run without weights may raise anything
            raise Uncountable(f"a module does not run on fake tensors ({type(error).__name__}: {error})") from error
        settings = mllm.language_settings
        head = head_of(mllm.language_model) if settings.ends_with_head and settings.postprocess is None else None
        self._at_once = None if head is None else at_once(head.out_features)

    def of(self, samples: Sequence[Sample | SampleOutline], table: StepTable | None = None) -> dict[str, Flops]:
        """Module -> FLOPs of one step, forward and backward of all ranks together, without the optimizer.

        table: assignment of samples to chunks (default: all samples in one chunk of each module).
        """
        chunks: list[tuple[str, Sequence[int]]] = [
            (name, range(len(samples))) for name in self.mllm.modules_order() if table is None
        ]
        if table is not None:
            chunks = [(chunk.module, chunk.samples.tolist()) for chunk in table.chunks]
        flops = dict.fromkeys(self.mllm.modules_order(), Flops(0, 0))
        for name, members in chunks:
            of = self._language if name == LANGUAGE_MODEL else self._encoder
            flops[name] = flops[name].plus(of(name, [samples[i] for i in members]))
        return flops

    # ---------------------------------------------------------------- modules

    def _encoder(self, name: str, samples: Sequence[Sample | SampleOutline]) -> Flops:
        encoder = self.encoders[name]
        works = [encoder.of(item) for sample in samples for item in sample.media.get(name, ())]
        needed = executed = 0
        side_by_side: dict[Attends, list[Document]] = {}
        together = encoder.encoder.packing == PACKED or encoder.encoder.in_one_row
        for work in works:
            needed += work.products.model
            executed += self._executed(work.products)
            for kind, lengths in work.attention:
                documents = [Document(length) for length in lengths]
                needed += kind.model(sum(map(visible, documents)))
                if together:
                    side_by_side.setdefault(kind, []).extend(documents)
                else:
                    executed += kind.executed(visited(documents), recompute=self.recompute)
        for kind, documents in side_by_side.items():
            executed += kind.executed(visited(documents), recompute=self.recompute)
        return Flops(needed, executed)

    def _language(self, _: str, samples: Sequence[Sample | SampleOutline]) -> Flops:
        settings = self.mllm.language_settings
        fed = [any(sample.media.get(name) for name, e in self.encoders.items() if e.gradients) for sample in samples]
        documents = [Document(len(sample), True, self._spans(sample)) for sample in samples]
        targets = [sample.targets for sample in samples]
        needed = 0
        for document, wanted, has_features in zip(documents, targets, fed, strict=True):
            work = self._fed if has_features else self._plain
            needed += work.token.model * document.length + work.target.model * wanted
            needed += sum(kind.model(visible(document, kind.limits)) for kind in work.attention)
        work = self._fed if any(fed) else self._plain  # the backward is over the whole chunk
        longest = max((document.length for document in documents), default=0)
        tokens = sum(document.length for document in documents)
        if settings.packing == ROWS:
            rows = [([document], longest) for document in documents]
            tokens = longest * len(documents)
        elif settings.packing == ALONE or (settings.limit is not None and longest > settings.limit):
            rows = [([document], 0) for document in documents]
        else:
            rows = [(documents, 0)]
        executed = self._executed(work.token, tokens) + work.target.model * sum(targets)
        if self._at_once is not None and work.target.backward and sum(targets) > self._at_once:
            executed += work.target.forward * sum(targets)  # logits that were not kept
        for kind in work.attention:
            pairs = sum(visited(row, kind.limits, row=length) for row, length in rows)
            executed += kind.executed(pairs, recompute=self.recompute)
        return Flops(needed, executed)

    def _executed(self, products: Products, times: int = 1) -> int:
        return (products.model + (products.again if self.recompute else 0)) * times

    def _spans(self, sample: Sample | SampleOutline) -> tuple[Span, ...]:
        """Spans of a sample's items whose tokens attend to each other in both directions."""
        if not self.mllm.language_settings.bidirectional or not sample.media:
            return ()
        spans: list[Span] = []
        joined = self.mllm.language_settings.bidirectional == JOINED
        for name, token in self.mllm.placeholders.items():
            if items := sample.media.get(name):
                if isinstance(sample, SampleOutline):
                    starts = sample.starts[name]
                else:
                    starts = item_starts(sample.input_ids, token, [item.tokens for item in items])
                first = len(spans)
                for item, start in zip(items, starts, strict=True):
                    end = start + item.tokens
                    if joined and len(spans) > first and spans[-1][1] == start:
                        start = spans.pop()[0]  # as collate_language joins items that touch
                    spans.append((start, end))
        return tuple(sorted(spans))
