"""Masks for attention benchmarks and tests, each as a function of its length, as a mask and as a formula.

`MASKS[name](length)` is a BitfieldMask of one row. `FORMULAS[name](length, device)` is the same mask as arithmetic on
the indices i (query) and j (key), as a FlexAttention user would write it by hand. The two share only the layout (the
document or image of each token), so each checks the other (tests/attention/test_bench_masks.py). The formula is also
FlexAttention's own best case in the benchmark.

Everything is deterministic. Sizes that a source fixes (256 tokens per image, a window of 4,096) apply from the length
at which they fit, and shrink below it, so every mask exists at every length. Runs are not multiples of 128: boundaries
fall inside blocks, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interlace.masks import NO_WINDOW, BitfieldMask, Segment, word

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, i, j) -> bool, broadcasting
Run = tuple[str, int]  # kind and number of tokens

DOCUMENTS = (30, 5, 20, 10, 15, 12, 5, 3)  # shares of a row, uneven as packed corpora are
SAMPLE = {"image": 1196, "audio": 1500, "text": 1000}  # 1280x720 image, 2 minutes of audio, text: dissertation 3.5.1
FRAMES = 64


def full(length: int) -> BitfieldMask:
    """Every token sees every token (vision encoders; FlashMask "full")."""
    return BitfieldMask.full(1, length)


def causal(length: int) -> BitfieldMask:
    """Every token sees itself and the tokens before it."""
    return BitfieldMask.causal(1, length)


def sliding_window(length: int) -> BitfieldMask:
    """Causal, the last 1,024 tokens: the local layers of Gemma-3 (FlashMask "sliding window")."""
    return BitfieldMask.causal(1, length, window=_window(length, 1024))


def document_causal(length: int) -> BitfieldMask:
    """Eight packed documents of uneven lengths, causal within each (FlashMask "causal document")."""
    return BitfieldMask.pack([BitfieldMask.causal(1, n) for n in cut(length, DOCUMENTS)])


def prefix_lm(length: int) -> BitfieldMask:
    """The first half sees itself both ways, the rest is causal (FlashMask "prefix-LM causal"; PaliGemma)."""
    span = torch.full((1, length), -1, dtype=torch.int32)
    span[:, : length // 2] = 0
    return BitfieldMask(torch.full((1, length), word(0, causal=True)), span=span)


def shared_question(length: int) -> BitfieldMask:
    """A question of 20 % and four answers that see it and themselves, not each other (DCP; FlashMask)."""
    bits = [
        torch.full((n,), word(part, {0, part}, causal=True)) for part, n in enumerate(cut(length, (20, 20, 20, 20, 20)))
    ]
    return BitfieldMask(torch.cat(bits)[None])


def lambda_mask(length: int) -> BitfieldMask:
    """Causal, 64 sinks and a window of 4,096 (DCP "lambda"; StreamingLLM)."""
    return BitfieldMask.causal(1, length, window=_window(length, 4096), sinks=_sinks(length))


def causal_blockwise(length: int) -> BitfieldMask:
    """Blocks of 256: each sees the first one, the two before it and itself, causally; the last sees all (DCP)."""
    size = _block(length)
    index = torch.arange(length, dtype=torch.int32)
    window = index % size + 2 * size + 1  # back to the start of the block two before
    window[index // size == (length - 1) // size] = NO_WINDOW
    bits = torch.full((1, length), word(0, causal=True))
    return BitfieldMask(bits, window=window[None].contiguous(), sinks=size)


def cornstarch_ep(length: int) -> BitfieldMask:
    """Cornstarch, encoder outputs prepended: image, audio, text; only text sees other kinds (2025-03 figure 11a)."""
    return _cornstarch(_ep(length))


def cornstarch_ee(length: int) -> BitfieldMask:
    """Cornstarch, encoder outputs embedded in the text (2025-03 figure 11b)."""
    return _cornstarch(_ee(length))


def cornstarch_mp(length: int) -> BitfieldMask:
    """Cornstarch, multimodal packing: samples of both layouts side by side in one row (2025-03 figure 11c)."""
    return BitfieldMask.pack([_cornstarch(runs) for runs in _mp(length)])


def gemma3_images(length: int) -> BitfieldMask:
    """Images of 256 tokens between runs of text: causal, both ways within an image (Gemma-3's global layers)."""
    return BitfieldMask.from_segments([[Segment(*run) for run in _interleaved(length)]])


def video(length: int) -> BitfieldMask:
    """64 frames after a prompt, each behind its timestamp, then a question: both ways within a frame, else causal."""
    return BitfieldMask.from_segments([[Segment(*run) for run in _video(length)]])


def packed_images(length: int) -> BitfieldMask:
    """Four packed documents of equal length with a 256-token image each: the project's reference case on CPUs."""
    return BitfieldMask.pack(
        [BitfieldMask.from_segments([[Segment(*run) for run in runs]]) for runs in _four_documents(length)]
    )


MASKS: dict[str, Callable[[int], BitfieldMask]] = {
    "full": full,
    "causal": causal,
    "sliding_window": sliding_window,
    "document_causal": document_causal,
    "prefix_lm": prefix_lm,
    "shared_question": shared_question,
    "lambda": lambda_mask,
    "causal_blockwise": causal_blockwise,
    "cornstarch_ep": cornstarch_ep,
    "cornstarch_ee": cornstarch_ee,
    "cornstarch_mp": cornstarch_mp,
    "gemma3_images": gemma3_images,
    "video": video,
    "packed_images": packed_images,
}
MULTIMODAL = ("gemma3_images", "video", "packed_images", "cornstarch_ep", "cornstarch_ee", "cornstarch_mp")


# ---------------------------------------------------------------------- layouts


def cut(length: int, weights: Sequence[int]) -> list[int]:
    """`length` tokens in pieces proportional to `weights`; the pieces sum to `length` exactly."""
    ends = [length * sum(weights[: n + 1]) // sum(weights) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends)]


def ids(lengths: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """int32 [sum of lengths]: the index of each token's piece."""
    return torch.repeat_interleave(torch.tensor(lengths)).to(device=device, dtype=torch.int32)


def _window(length: int, wanted: int) -> int:
    return max(1, min(wanted, length // 4))


def _sinks(length: int) -> int:
    return min(64, length // 64)


def _block(length: int) -> int:
    return max(1, min(256, length // 8))


def _ep(length: int) -> list[Run]:
    image, audio, text = cut(length, list(SAMPLE.values()))
    return [("image", image), ("audio", audio), ("text", text)]


def _ee(length: int) -> list[Run]:
    image, audio, text = cut(length, list(SAMPLE.values()))
    before, between, after = cut(text, (2, 3, 5))
    return [("text", before), ("image", image), ("text", between), ("audio", audio), ("text", after)]


def _mp(length: int) -> list[list[Run]]:
    """Samples of about the dissertation's size but unequal, embedded and prepended in turn."""
    samples = max(2, length // sum(SAMPLE.values()))
    return [
        (_ep if n % 2 else _ee)(part) for n, part in enumerate(cut(length, [3 + n * 5 % 4 for n in range(samples)]))
    ]


def _interleaved(length: int) -> list[Run]:
    """Runs of text of five lengths in turn, an image after each, until the row is full; it ends with text."""
    image = max(1, min(256, length // 8))
    runs: list[Run] = []
    left = length
    while left > 0:
        text = min(left, max(1, (180, 41, 423, 90, 266)[len(runs) // 2 % 5] * image // 256))
        runs.append(("text", text))
        left -= text
        if left <= image:
            runs.append(("text", left))
            break
        runs.append(("image", image))
        left -= image
    return runs


def _video(length: int) -> list[Run]:
    """A sixteenth is the prompt, 7/8 the frames with 3 timestamp tokens each, the rest is the question."""
    share = length * 7 // 8 // FRAMES
    stamp = min(3, share // 2)
    runs: list[Run] = [("text", length // 16)]
    for _ in range(FRAMES):
        runs += [("text", stamp), ("frame", share - stamp)]
    return [*runs, ("text", length - sum(n for _, n in runs))]


def _four_documents(length: int) -> list[list[Run]]:
    documents = []
    for n, tokens in enumerate(cut(length, (1, 1, 1, 1))):
        image = min(256, tokens // 4)
        before = (tokens - image) * (n + 1) // 5
        documents.append([("text", before), ("image", image), ("text", tokens - image - before)])
    return documents


def _cornstarch(runs: Sequence[Run]) -> BitfieldMask:
    """Cornstarch's words in the dialect of the 2025 papers: text has every bit, an encoder's token only its own."""
    words = {"text": 0b111, "image": 0b010, "audio": 0b100}
    field = torch.cat([torch.full((n,), words[kind], dtype=torch.int64) for kind, n in runs])
    return BitfieldMask.from_cornstarch(field[None], dialect="text_bit")


# ---------------------------------------------------------------------- the same masks as index formulas


def _full_formula(length: int, device: torch.device | str) -> Formula:
    return lambda b, h, i, j: (i >= 0) & (j >= 0)


def _causal_formula(length: int, device: torch.device | str) -> Formula:
    return lambda b, h, i, j: j <= i


def _window_formula(length: int, device: torch.device | str) -> Formula:
    window = _window(length, 1024)
    return lambda b, h, i, j: (j <= i) & (i - j < window)


def _document_formula(length: int, device: torch.device | str) -> Formula:
    document = ids(cut(length, DOCUMENTS), device)
    return lambda b, h, i, j: (j <= i) & (document[i] == document[j])


def _prefix_formula(length: int, device: torch.device | str) -> Formula:
    prefix = length // 2
    return lambda b, h, i, j: (j <= i) | ((i < prefix) & (j < prefix))


def _question_formula(length: int, device: torch.device | str) -> Formula:
    part = ids(cut(length, (20, 20, 20, 20, 20)), device)
    return lambda b, h, i, j: (j <= i) & ((part[j] == 0) | (part[i] == part[j]))


def _lambda_formula(length: int, device: torch.device | str) -> Formula:
    window, sinks = _window(length, 4096), _sinks(length)
    return lambda b, h, i, j: (j <= i) & ((i - j < window) | (j < sinks))


def _blockwise_formula(length: int, device: torch.device | str) -> Formula:
    size = _block(length)
    last = (length - 1) // size
    return lambda b, h, i, j: (j <= i) & ((i // size - j // size <= 2) | (j < size) | (i // size == last))


def _kinds(documents: Sequence[Sequence[Run]], device: torch.device | str) -> Tensor:
    """int32 [T]: 0 for text, 1 for image, 2 for audio."""
    numbers = {"text": 0, "image": 1, "audio": 2}
    runs = [run for runs in documents for run in runs]
    kinds = torch.repeat_interleave(
        torch.tensor([numbers[kind] for kind, _ in runs]), torch.tensor([n for _, n in runs])
    )
    return kinds.to(device=device, dtype=torch.int32)


def _media(documents: Sequence[Sequence[Run]], device: torch.device | str) -> Tensor:
    """int32 [T]: the index of each token's image or frame, -1 for text."""
    runs = [run for runs in documents for run in runs]
    number = torch.tensor([-1 if kind == "text" else n for n, (kind, _) in enumerate(runs)])
    return torch.repeat_interleave(number, torch.tensor([n for _, n in runs])).to(device=device, dtype=torch.int32)


def _cornstarch_formula(documents: Sequence[Sequence[Run]], device: torch.device | str) -> Formula:
    kind = _kinds(documents, device)
    if len(documents) == 1:
        return lambda b, h, i, j: torch.where(kind[i] == 0, j <= i, kind[i] == kind[j])
    document = ids([sum(n for _, n in runs) for runs in documents], device)
    return lambda b, h, i, j: (document[i] == document[j]) & torch.where(kind[i] == 0, j <= i, kind[i] == kind[j])


def _spans_formula(documents: Sequence[Sequence[Run]], device: torch.device | str) -> Formula:
    medium = _media(documents, device)
    if len(documents) == 1:
        return lambda b, h, i, j: (j <= i) | ((medium[i] >= 0) & (medium[i] == medium[j]))
    document = ids([sum(n for _, n in runs) for runs in documents], device)
    return lambda b, h, i, j: (document[i] == document[j]) & ((j <= i) | ((medium[i] >= 0) & (medium[i] == medium[j])))


FORMULAS: dict[str, Callable[[int, torch.device | str], Formula]] = {
    "full": _full_formula,
    "causal": _causal_formula,
    "sliding_window": _window_formula,
    "document_causal": _document_formula,
    "prefix_lm": _prefix_formula,
    "shared_question": _question_formula,
    "lambda": _lambda_formula,
    "causal_blockwise": _blockwise_formula,
    "cornstarch_ep": lambda length, device: _cornstarch_formula([_ep(length)], device),
    "cornstarch_ee": lambda length, device: _cornstarch_formula([_ee(length)], device),
    "cornstarch_mp": lambda length, device: _cornstarch_formula(_mp(length), device),
    "gemma3_images": lambda length, device: _spans_formula([_interleaved(length)], device),
    "video": lambda length, device: _spans_formula([_video(length)], device),
    "packed_images": lambda length, device: _spans_formula(_four_documents(length), device),
}
