"""The stamps as a training mixture: images at their own size, speech in ten languages, captions, mixed by weights.

Kinds of samples (the language tag in the prompt determines the answer's language):

    image           one picture               -> its caption in a language drawn among its captions
    speech          one spoken description    -> the caption in the speech's language
    image+speech    both                      -> the caption in the speech's language
    images          2..max_images pictures    -> their captions, one a line, in a language that all have
    text            a caption                 -> the same caption in another language
    category        one picture, "What is it?"          -> the stamp's folder, such as "animals"
    language        one description, "Which language?"  -> its code, such as "fr"

The last two have one right answer of one word, so how many are right tells whether pictures and speech are used.

Trade-offs: each kind walks through its own files in a seeded order, epoch after epoch, so that no file comes twice
before all have come once; but an epoch is a fixed number of samples, not one pass over the 7,300 clips.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interlace.data.base import MediaRef, MultimodalDataset, Recipe, kind_of_file
from interlace.data.index import Clip, Stamp, is_held_out, load_index
from interlace.data.media import AudioSpec, DecodeError, ImageSpec, ImageTooLarge, modality_of
from interlace.data.pack import Item, Pack, open_pack
from interlace.data.tokenizer import ByteTokenizer

LANGUAGES = ("en", "fr", "es", "ca", "ro", "da", "ru", "bg", "be", "el")
KINDS: dict[str, tuple[str, ...]] = {  # kind -> modalities it needs
    "image": ("vision",),
    "speech": ("audio",),
    "image+speech": ("vision", "audio"),
    "images": ("vision",),
    "text": (),
    "category": ("vision",),
    "language": ("audio",),
}
WEIGHTS = {
    "image": 0.25, "speech": 0.15, "image+speech": 0.15, "images": 0.1, "text": 0.1, "category": 0.15, "language": 0.1,
}  # fmt: skip
QUESTIONS = {"category": "What is it?", "language": "Which language?"}
ASKED_IN = "en"
ANSWER_BYTES = 16  # no folder's name is longer


@dataclass
class _Entry:
    """A stamp with what of it can be used."""

    stamp: Stamp
    image: tuple[MediaRef, ...]  # an item of each encoder that sees; none without a usable picture
    captions: dict[str, str]
    clips: list[tuple[Clip, tuple[MediaRef, ...]]]


class StampsDataset(MultimodalDataset):
    """The stamps under ``root`` (the folder that ``fetch_stamps`` returns) as a weighted mixture.

    weights: kind -> share of samples (KINDS); default WEIGHTS over the kinds whose modalities ``tokens`` has.
    languages: of captions and speech. held_out: share of stamps in split "heldout" (by hash of the stamp: no stamp,
    and no file shared between stamps, is in both splits, in any language or kind).
    length: samples per epoch; default 4 per stamp of the split.
    max_image_tokens: patches per image; larger ones are scaled down, or with on_too_large="error" refused with a
    message naming them. max_audio_seconds: longer clips are skipped and counted, never cut. max_caption_bytes likewise.
    mean, std: pixel normalisation (ImageSpec). specs: encoder -> how its files become tensors; by default "vision" and
    "audio", of the arguments above. cache: folder for the index and decoded files (default: beside root).
    workers: decoding processes of the first run. limit_bytes: most disk per cached modality.

    The first construction decodes every file once to find broken ones (``failures``) and to cache the results
    (50 s of processor time for the real package, shared by the cores); later ones take about half a second.
    """

    name = "stamps"

    def __init__(
        self,
        root: str | Path,
        *,
        tokens: Mapping[str, Callable[[tuple[int, ...]], int]],
        split: str = "train",
        seed: int = 0,
        weights: Mapping[str, float] | None = None,
        languages: Sequence[str] = LANGUAGES,
        held_out: float = 0.1,
        length: int | None = None,
        patch_size: int = 16,
        max_image_tokens: int = 64,
        on_too_large: str = "downscale",
        max_images: int = 4,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        mel_bins: int = 80,
        max_audio_seconds: float = 8.0,
        max_caption_bytes: int = 256,
        specs: Mapping[str, ImageSpec | AudioSpec] | None = None,
        tokenizer: ByteTokenizer | None = None,
        cache: str | Path | None = None,
        workers: int | None = None,
        limit_bytes: int = 2 << 30,
    ) -> None:
        if specs is None:
            image = ImageSpec(patch_size, max_image_tokens, tuple(mean), tuple(std))
            specs = {"vision": image, "audio": AudioSpec(mel_bins, max_audio_seconds)}
        super().__init__(tokens=tokens, specs=specs, split=split, seed=seed, tokenizer=tokenizer)
        if on_too_large not in ("downscale", "error"):
            raise ValueError(f'on_too_large must be "downscale" or "error", not {on_too_large!r}')
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is the share of stamps kept for validation, between 0 and 1; got {held_out}")
        if max_images < 2:
            raise ValueError(f"max_images must be at least 2, got {max_images}")
        if not languages:
            raise ValueError("languages is empty; name at least one, for example ['en']")
        self.weights = self._check_weights(weights)
        self.languages = tuple(languages)
        self.max_images = max_images
        self.max_caption_bytes = max_caption_bytes
        self.root = Path(root)
        self.index = load_index(self.root, cache)
        self.failures.update(self.index.failures)
        for path, (reason, language) in self.index.skipped.items():
            if language in ("", *self.languages):
                self.skipped[path] = reason
        broken = [kind_of_file(path) for path in self.index.failures]
        self.totals = {
            "pictures": sum(len(stamp.images) for stamp in self.index.stamps) + broken.count("pictures"),
            "clips": sum(len(stamp.clips) for stamp in self.index.stamps) + broken.count("clips"),
        }
        cache = Path(cache) if cache is not None else self.root.parent
        used = {modality for kind in self.weights for modality in KINDS[kind]}
        self._packs: dict[str, Pack] = {}
        for name in self.tokens:
            spec = self.specs[name]
            if modality_of(spec) in used:
                self._packs[name] = open_pack(
                    self.root,
                    self._clip_items(spec)
                    if isinstance(spec, AudioSpec)
                    else self._image_items(spec, strict=on_too_large == "error"),
                    spec,
                    cache,
                    signature=self.index.signature,
                    workers=workers,
                    limit_bytes=limit_bytes,
                )
                self.failures.update(self._packs[name].failures)
        stamps = [s for s in self.index.stamps if is_held_out(s, held_out) == (split == "heldout")]
        self.entries = [entry for entry in map(self._entry, stamps) if entry.captions]
        self._pools = self._make_pools()
        for kind in self.weights:
            if not len(self._pools[kind]):
                raise ValueError(
                    f"no {split} sample of kind {kind!r} can be made from {self.root} with languages "
                    f"{list(self.languages)}; set its weight to 0, or change languages or held_out. {self.report()}"
                )
        self.length = 4 * len(self.entries) if length is None else length
        if self.length < 1:
            raise ValueError(f"length is the number of samples per epoch, at least 1; got {self.length}")
        self._plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _check_weights(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        if weights is None:
            return {k: w for k, w in WEIGHTS.items() if all(map(self.encoders, KINDS[k]))}
        for kind, weight in weights.items():
            if kind not in KINDS:
                raise ValueError(f"unknown kind of sample {kind!r}; known: {', '.join(KINDS)}")
            if weight < 0:
                raise ValueError(f"the weight of {kind!r} is {weight}; weights are at least 0")
            missing = {modality for modality in KINDS[kind] if not self.encoders(modality)}
            if weight > 0 and missing:
                raise ValueError(f"{kind!r} samples need an encoder for {sorted(missing)}; set its weight to 0")
        chosen = {k: float(weights[k]) for k in KINDS if weights.get(k, 0) > 0}
        if not chosen:
            raise ValueError("all weights are 0; give at least one kind of sample a positive weight")
        return chosen

    # Files that can be used -------------------------------------------------------------------------------

    def _image_items(self, spec: ImageSpec, *, strict: bool) -> list[Item]:
        items: list[Item] = []
        refused: list[str] = []
        for image in (i for s in self.index.stamps for i in s.images):
            try:
                items.append((image.path, spec.fit(image.width, image.height, image.path, strict=strict)))
            except ImageTooLarge as error:
                refused.append(str(error))
                self.skipped[image.path] = f"too elongated for {spec.max_tokens} image tokens"
        if strict and refused:
            raise ImageTooLarge(f"{len(refused)} images exceed the token budget; the first: {refused[0]}")
        return items

    def _clip_items(self, spec: AudioSpec) -> list[Item]:
        items: list[Item] = []
        for stamp in self.index.stamps:
            for language in self.languages:
                clip = stamp.clips.get(language)
                if clip is None:
                    continue
                shape = spec.shape(clip.frames, clip.rate)
                if clip.seconds > spec.max_seconds:
                    self.skipped[clip.path] = f"longer than {spec.max_seconds:g} s"
                elif shape[1] < 2:
                    self.skipped[clip.path] = "shorter than 20 ms"
                else:
                    items.append((clip.path, shape))
        return items

    def _entry(self, stamp: Stamp) -> _Entry:
        captions = {}
        for language in self.languages:
            caption = stamp.captions.get(language)
            if caption is not None and len(caption.encode()) <= self.max_caption_bytes:
                captions[language] = caption
            elif caption is not None:
                reason = f"caption longer than {self.max_caption_bytes} bytes"
                self.skipped[f"{stamp.key}.txt [{language}]"] = reason
        images = self._usable("vision", [i.path for i in stamp.images])
        clips = [stamp.clips[language] for language in captions if language in stamp.clips]
        refs = {each[0].source: each for each in self._usable("audio", [c.path for c in clips])}
        return _Entry(
            stamp, images[0] if images else (), captions, [(c, refs[c.path]) for c in clips if c.path in refs]
        )

    def _usable(self, modality: str, paths: Sequence[str]) -> list[tuple[MediaRef, ...]]:
        """Those of the files that all encoders of the modality can read: an item of each."""
        packs = {name: self._packs[name] for name in self.encoders(modality) if name in self._packs}
        return [
            tuple(MediaRef(name, path, pack.shapes[path]) for name, pack in packs.items())
            for path in paths
            if packs and all(path in pack.shapes for pack in packs.values())
        ]

    # Which sample is which --------------------------------------------------------------------------------

    def _make_pools(self) -> dict[str, np.ndarray]:
        """Kind -> the things it walks through: [n, 2] (entry, clip); clip is 0 where the kind has none."""
        with_image = [(e, 0) for e, entry in enumerate(self.entries) if entry.image]
        clips = [(e, c) for e, entry in enumerate(self.entries) for c in range(len(entry.clips))]
        pools = {
            "image": with_image,
            "speech": clips,
            "image+speech": [(e, c) for e, c in clips if self.entries[e].image],
            "images": with_image if len(with_image) > 1 else [],
            "text": [(e, 0) for e in range(len(self.entries))],
            "category": with_image,
            "language": clips,
        }
        self._by_language = {
            language: np.array([e for e, _ in with_image if language in self.entries[e].captions], dtype=np.int64)
            for language in self.languages
        }
        return {kind: np.array(pool, dtype=np.int64).reshape(-1, 2) for kind, pool in pools.items()}

    def __len__(self) -> int:
        return self.length

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(kind [n], place in the kind's pool [n]) of an epoch's samples."""
        plan = self._plans.get(epoch)
        if plan is None:
            shares = np.array(list(self.weights.values()))
            exact = shares / shares.sum() * self.length
            counts = np.floor(exact).astype(np.int64)
            counts[np.argsort(counts - exact, kind="stable")[: self.length - counts.sum()]] += 1
            kinds = np.repeat(np.arange(len(counts)), counts)
            places = np.empty(self.length, dtype=np.int64)
            for k, (kind, count) in enumerate(zip(self.weights, counts, strict=True)):
                places[kinds == k] = self._walk(kind, k, epoch * int(count), int(count))
            order = np.random.default_rng([self.seed, 1, epoch]).permutation(self.length)
            plan = kinds[order], places[order]
            self._plans = {**{e: p for e, p in self._plans.items() if abs(e - epoch) < 2}, epoch: plan}
        return plan

    def _walk(self, kind: str, number: int, start: int, count: int) -> np.ndarray:
        """``count`` places of the endless walk through the kind's pool (a new permutation per pass)."""
        size = len(self._pools[kind])
        passes = range(start // size, (start + count - 1) // size + 1) if count else range(0)
        walked = [np.random.default_rng([self.seed, 2, number, p]).permutation(size) for p in passes]
        offset = start - passes.start * size if count else 0
        return np.concatenate([*walked, np.empty(0, dtype=np.int64)])[offset : offset + count]

    def recipe(self, index: int, epoch: int | None = None) -> Recipe:
        epoch = self.epoch if epoch is None else int(epoch)
        index = int(index)
        if not -self.length <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        index %= self.length
        kinds, places = self._plan(epoch)
        kind = list(self.weights)[kinds[index]]
        entry_number, clip_number = self._pools[kind][places[index]]
        if kind in QUESTIONS:
            return self._question(kind, int(entry_number), int(clip_number))
        entry = self.entries[entry_number]
        rng = np.random.default_rng([self.seed, 3, epoch, index])
        key = entry.stamp.key
        if kind in ("speech", "image+speech"):
            clip, refs = entry.clips[clip_number]
            image = entry.image if kind == "image+speech" else ()
            return Recipe(kind, (*image, *refs), clip.language, entry.captions[clip.language], stamp=key)
        languages = list(entry.captions)
        language = languages[int(rng.integers(len(languages)))]
        if kind == "text":
            others = [x for x in languages if x != language]
            text = entry.captions[others[int(rng.integers(len(others)))]] if others else ""
            return Recipe(kind, (), language, entry.captions[language], text, stamp=key)
        chosen = [int(entry_number)]
        if kind == "images":
            pool = self._by_language[language]
            others_pool = pool[pool != entry_number]
            wanted = min(int(rng.integers(1, self.max_images)), len(others_pool))
            chosen += [int(e) for e in rng.choice(others_pool, wanted, replace=False)]
        picks = [self.entries[e] for e in chosen]
        images = tuple(ref for pick in picks for ref in pick.image)
        return Recipe(kind, images, language, "\n".join(p.captions[language] for p in picks), stamp=key)

    def _question(self, kind: str, entry_number: int, clip_number: int) -> Recipe:
        entry = self.entries[entry_number]
        if kind == "language":
            clip, refs = entry.clips[clip_number]
            return Recipe(kind, refs, ASKED_IN, clip.language, QUESTIONS[kind], entry.stamp.key)
        folder = entry.stamp.key.partition("/")[0]
        return Recipe(kind, entry.image, ASKED_IN, folder, QUESTIONS[kind], entry.stamp.key)

    def questions(self) -> dict[str, list[Recipe]]:
        asked = [kind for kind in self.weights if kind in QUESTIONS]
        return {kind: [self._question(kind, e, c) for e, c in self._pools[kind].tolist()] for kind in asked}

    def extremes(self) -> Iterable[Recipe]:
        """The longest samples and prompts that can be drawn, found from the entries alone: epochs draw at random."""
        for kind in self.weights:
            if kind == "images":
                for language in self.languages:
                    yield from self._longest_images(language)
            elif kind in QUESTIONS:
                yield from (self._question(kind, e, c) for e, c in self._pools[kind].tolist())
            else:
                for entry in self.entries:
                    yield from self._longest_texts(entry) if kind == "text" else self._longest_of(entry, kind)

    def _longest_images(self, language: str) -> Iterable[Recipe]:
        pool = [e for e in self.entries if e.image and language in e.captions]
        tokens = [sum(map(self._size, e.image)) for e in pool]
        answers = [self._size(e.captions[language]) for e in pool]
        for weights in ([t + a for t, a in zip(tokens, answers, strict=True)], tokens):
            picks = [pool[i] for i in np.argsort(weights, kind="stable")[-self.max_images :]]
            images = tuple(ref for pick in picks for ref in pick.image)
            if images:
                yield Recipe("images", images, language, "\n".join(e.captions[language] for e in picks))

    def _longest_texts(self, entry: _Entry) -> Iterable[Recipe]:
        captions = entry.captions
        if len(captions) == 1:
            yield from (Recipe("text", (), language, caption) for language, caption in captions.items())
            return
        texts = heapq.nlargest(2, captions, key=lambda x: self._size(captions[x]))
        with_answer = heapq.nlargest(2, captions, key=lambda x: self._size(captions[x]) + self._size(x))
        for language in {*with_answer, *heapq.nlargest(2, captions, key=self._size)}:
            for text in texts:
                if text != language:
                    yield Recipe("text", (), language, captions[language], captions[text])

    def _longest_of(self, entry: _Entry, kind: str) -> Iterable[Recipe]:
        image = entry.image if kind != "speech" else ()
        if kind != "speech" and not image:
            return
        choices: list[tuple[str, tuple[MediaRef, ...]]] = [(language, image) for language in entry.captions]
        if kind != "image":
            choices = [(clip.language, (*image, *refs)) for clip, refs in entry.clips]
        prompts = [self._size(language) + sum(map(self._size, media)) for language, media in choices]
        samples = [p + self._size(entry.captions[c[0]]) for p, c in zip(prompts, choices, strict=True)]
        for weights in (samples, prompts) if choices else ():
            language, media = choices[int(np.argmax(weights))]
            yield Recipe(kind, media, language, entry.captions[language])

    def _size(self, part: str | MediaRef) -> int:
        """Tokens of a text or a media item."""
        if isinstance(part, str):
            return len(self.tokenizer.encode(part))
        return self.count_tokens(part.modality, part.shape)

    def read(self, item: MediaRef) -> np.ndarray:
        try:
            return self._packs[item.modality].read(item.source)
        except KeyError:
            raise DecodeError(f"{item.source}: not a file of this dataset") from None

    def caption_languages(self) -> dict[str, int]:
        """Stamps of this split per caption language."""
        return dict(_count(language for entry in self.entries for language in entry.captions))

    def stamp_keys(self) -> list[str]:
        """The stamps of this split, for showing that splits do not overlap."""
        return [entry.stamp.key for entry in self.entries]


def _count(items: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return sorted(counts.items(), key=lambda x: (-x[1], x[0]))


__all__ = ["KINDS", "LANGUAGES", "WEIGHTS", "StampsDataset"]
