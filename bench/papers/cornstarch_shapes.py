"""Models of both Cornstarch papers as shapes, and the costs of a sample in each of their modules."""

from __future__ import annotations

from bench.papers.pipeline import LANGUAGE_MODEL
from bench.papers.shapes import A40, Transformer, causal_pairs
from interlace.plan import ModuleCosts

LLAMA = {  # layers and hidden size as printed, the rest from the published models
    "S": Transformer.of(16, 2048, 8192, heads=32, kv_heads=8, gated=True, vocabulary=128256, tied=True),
    "M": Transformer.of(32, 4096, 14336, heads=32, kv_heads=8, gated=True, vocabulary=128256),
    "L": Transformer.of(64, 5120, 27648, heads=40, kv_heads=8, gated=True, vocabulary=128256),
}
EVA_CLIP = {
    "S": Transformer.of(40, 1408, 6144),
    "M": Transformer.of(32, 4096, 20480),
    "L": Transformer.of(48, 5120, 25600),
}
WHISPER = {size: Transformer.of(n, h, 4 * h) for size, n, h in (("S", 32, 1920), ("M", 40, 3840), ("L", 48, 5120))}
QWEN2_VISION = {size: Transformer.of(n, h, 4 * h) for size, n, h in (("S", 32, 1280), ("M", 48, 2560), ("L", 64, 3840))}
# A Conformer: more than attention and FFN; the layer size follows from the printed parameters.
PHI4_AUDIO = {
    "S": Transformer(24, 1024, round(0.5e9 / 24)),
    "M": Transformer(32, 3072, round(3.4e9 / 32)),
    "L": Transformer(48, 5120, round(12.4e9 / 48)),
}

TEXT = 1000  # tokens of a sample
RECOMPUTED = "checkpointed layers run their forward again before a backward, as the papers train (2025-03 figure 3b)"
FROZEN = "encoders and the language model are frozen, projectors of one linear layer are trained"


def march(llm: str, vision: str = "", audio: str = "", gpus: int = 4) -> dict[str, ModuleCosts]:
    """Costs of one sample (2025-03): an image of 4 tiles of 256 tokens, 30 s of audio of 1,500 frames, 1,000 of text.

    Sizes S, M and L; "" leaves an encoder out. gpus: of a stage (TP 2 and CP 2).
    """
    spf = 1 / (A40.peak * A40.efficiency * gpus)
    width, tokens, costs = LLAMA[llm].hidden, TEXT, {}
    if vision:
        costs["vision"] = EVA_CLIP[vision].costs(4 * 256, 4 * 256**2, spf, projector=width)
        tokens += 4 * 256
    if audio:
        costs["audio"] = WHISPER[audio].costs(1500, 1500**2, spf, projector=width)
        tokens += 1500
    return costs | {LANGUAGE_MODEL: LLAMA[llm].costs(tokens, causal_pairs(tokens), spf)}


MARCH_ASSUMED = (
    f"seconds from FLOPs at {A40}; ratios do not depend on it",
    "a sample: 1,000 tokens of text, an image of 4 tiles of 256 tokens, 30 s of audio as 1,500 frames (the paper says "
    "1.5k to 4k tokens in all)",
    f"{FROZEN}; {RECOMPUTED}; transfers are free",
)
PATCHES, IMAGE = 4784, 1196  # of 1280 x 720 at patch 14: before and after 2 x 2 of them become one token
CLIP = 1500  # tokens of 2 minutes of audio


def november(name: str, batch: int = 4, gpus: int = 2) -> dict[str, ModuleCosts]:
    """Costs of a microbatch (2025-11) of MLLM-`name`, sizes of vision, audio and language model; 2 GPUs of a stage."""
    vision, audio, llm = name
    spf = batch / (A40.peak * A40.efficiency * gpus)
    width, tokens = LLAMA[llm].hidden, TEXT + IMAGE + CLIP
    return {
        "vision": QWEN2_VISION[vision].costs(PATCHES, PATCHES**2, spf, projector=width),
        "audio": PHI4_AUDIO[audio].costs(CLIP, CLIP**2, spf, projector=width),
        LANGUAGE_MODEL: LLAMA[llm].costs(tokens, causal_pairs(tokens), spf),
    }


NOVEMBER_ASSUMED = (
    f"seconds from FLOPs at {A40}; ratios of pipelines do not depend on it",
    f"a sample: 1,000 tokens of text, an image of {PATCHES:,} patches that become {IMAGE:,} tokens, 2 minutes of audio "
    f"of {CLIP:,} tokens at 12.5 Hz",
    f"12 stages of 2 GPUs (TP 2 is not printed); {FROZEN}; {RECOMPUTED}; transfers are free",
)
