"""Faults in folders of HuggingFace models."""

from __future__ import annotations

from typing import Any

import torch

from tests.train.faults import Fault, Place

PARTS = "train {at}/parts.toml"
WHOLE = "train {at}/whole.toml"
INDEX = "language/model.safetensors.index.json"


def _shard(at: Place, number: int = 0) -> str:
    return f"language/{sorted(path.name for path in (at.at / 'language').glob('model-*.safetensors'))[number]}"


def _first(change: Any) -> Any:
    """Changes the first tensor of the encoder."""

    def changed(found: dict[str, torch.Tensor]) -> None:
        key = sorted(found)[0]
        change(found, key)

    return lambda at: at.tensors("encoder/model.safetensors", changed)


def _remote(at: Place) -> None:
    at.table("whole/config.json", model_type="my_vlm", auto_map={"AutoModel": "modeling.MyVLM"})
    at.write("whole/modeling.py", "raise SystemExit('code of a stranger')")


HUGGINGFACE = [
    Fault(
        "a missing shard",
        PARTS,
        ("index.json names 'model-00001-of-00003.safetensors', which is missing; copy the folder again",),
        lambda at: at.remove(_shard(at)),
    ),
    Fault(
        "a cut-off shard",
        PARTS,
        (
            "model-00001-of-00003.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.cut(_shard(at)),
    ),
    Fault(
        "an empty shard",
        PARTS,
        (
            "model-00001-of-00003.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.write(_shard(at), b""),
    ),
    Fault(
        "an index that is no JSON",
        PARTS,
        ("model.safetensors.index.json is not valid JSON: Unterminated string",),
        lambda at: at.cut(INDEX),
    ),
    Fault(
        "an index that is a list",
        PARTS,
        ("model.safetensors.index.json is not a JSON object",),
        lambda at: at.write(INDEX, "[]"),
    ),
    Fault(
        "an index of files elsewhere",
        PARTS,
        ("names '../../etc/passwd', which is missing; copy the folder again",),
        lambda at: at.table(INDEX, weight_map={"a": "../../etc/passwd"}),
    ),
    Fault(
        "a cut-off file",
        PARTS,
        (
            "encoder/model.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.cut("encoder/model.safetensors"),
    ),
    Fault(
        "a file that ends in its header",
        PARTS,
        (
            "encoder/model.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.cut("encoder/model.safetensors", 0.01),
    ),
    Fault(
        "a pointer of Git LFS",
        PARTS,
        (
            "encoder/model.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.write(
            "encoder/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
        ),
    ),
    Fault(
        "a missing weight",
        PARTS,
        (
            "has no weight 'embeddings.patch_embedding.bias', which SiglipVisionModel needs",
            "copy it again",
        ),
        _first(lambda found, key: found.pop(key)),
    ),
    Fault(
        "a weight too many",
        PARTS,
        ("has 'embeddings.patch_embedding.bias_more', but SiglipVisionModel with this config does not",),
        _first(lambda found, key: found.update({key + "_more": torch.ones(2)})),
    ),
    Fault(
        "a weight of another shape",
        PARTS,
        ("embeddings.patch_embedding.bias has shape [3], but [16] follows from the config",),
        _first(lambda found, key: found.update({key: torch.ones(3)})),
    ),
    Fault(
        "weights of 8 bits",
        PARTS,
        (
            "is of dtype I8: quantized weights are not supported",
            "give the unquantized model",
        ),
        _first(lambda found, key: found.update({key: found[key].mul(9).to(torch.int8)})),
    ),
    Fault(
        "weights that are not finite",
        PARTS,
        (
            "embeddings.patch_embedding.bias has values that are not finite",
            "copy the file again",
        ),
        _first(lambda found, key: found.update({key: found[key] * float("nan")})),
    ),
    Fault(
        "a quantized model",
        PARTS,
        (
            "language has quantized weights (gptq)",
            "give the unquantized model",
        ),
        lambda at: at.table("language/config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    Fault(
        "a quantized whole model",
        WHOLE,
        (
            "whole has quantized weights (awq)",
            "give the unquantized model",
        ),
        lambda at: at.table("whole/config.json", quantization_config={"quant_method": "awq", "bits": 4}),
    ),
    Fault(
        "no config.json",
        PARTS,
        ("encoder/config.json: cannot read it: No such file or directory",),
        lambda at: at.remove("encoder/config.json"),
    ),
    Fault(
        "a broken config.json",
        PARTS,
        ("encoder/config.json is not valid JSON: Unterminated string",),
        lambda at: at.cut("encoder/config.json"),
    ),
    Fault(
        "an unknown model type",
        PARTS,
        ("has model_type = 'my_vit', which transformers 5.",),
        lambda at: at.table("encoder/config.json", model_type="my_vit"),
    ),
    Fault(
        "no config.json of a whole model",
        WHOLE,
        ("whole has no config.json: give a folder written by HuggingFace's save_pretrained",),
        lambda at: at.remove("whole/config.json"),
    ),
    Fault(
        "a broken config.json of a whole model",
        WHOLE,
        (
            "whole/config.json",
            "is not a valid JSON file",
        ),
        lambda at: at.cut("whole/config.json"),
    ),
    Fault(
        "code of a stranger",
        WHOLE,
        (
            "whole needs its own code (auto_map in config.json), which is never run",
            "converted to a transformers class",
        ),
        _remote,
    ),
    Fault(
        "another number of layers than weights",
        WHOLE,
        (
            "layers.1.input_layernorm.weight', which LlavaForConditionalGeneration has not",
            "config.json is of another model",
        ),
        lambda at: at.edit("whole/config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1'),
    ),
    Fault(
        "a pickle alone",
        WHOLE,
        ("only the pickle pytorch_model.bin: save the model again with safetensors",),
        lambda at: (at.remove("whole/model.safetensors"), at.write("whole/pytorch_model.bin", b"\x80\x04.")),
    ),
    Fault(
        "no weights",
        WHOLE,
        ("whole has no model.safetensors and no model.safetensors.index.json",),
        lambda at: at.remove("whole/model.safetensors"),
    ),
    Fault(
        "cut-off weights of a whole model",
        WHOLE,
        (
            "whole/model.safetensors is damaged",
            "copy it again",
        ),
        lambda at: at.cut("whole/model.safetensors"),
    ),
    Fault(
        "no tokenizer.json",
        WHOLE,
        ("no processor can be loaded: it has no tokenizer.json: copy it from where the model was saved",),
        lambda at: at.remove("whole/tokenizer.json"),
    ),
    Fault(
        "a broken tokenizer.json",
        WHOLE,
        (
            "tokenizer.json is no JSON (",
            "copy the folder again",
        ),
        lambda at: at.cut("whole/tokenizer.json"),
    ),
    Fault(
        "no processor",
        WHOLE,
        ("it has no preprocessor_config.json: copy it from where the model was saved",),
        lambda at: (at.remove("whole/preprocessor_config.json"), at.remove("whole/processor_config.json")),
    ),
    Fault(
        "a broken preprocessor_config.json",
        WHOLE,
        ("preprocessor_config.json is not valid JSON: ",),
        lambda at: at.cut("whole/preprocessor_config.json"),
    ),
    Fault(
        "no chat template",
        WHOLE,
        ("whole has no chat template: give a file with one as data.chat_template",),
        lambda at: at.remove("whole/chat_template.jinja"),
    ),
    Fault(
        "a processor with other patches",
        WHOLE,
        (
            "an image of shape (3, 42, 42) does not fit",
            "resize images to (3, 28, 28)",
        ),
        lambda at: at.table(
            "whole/preprocessor_config.json", size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42}
        ),
    ),
    Fault(
        "a placeholder that the tokenizer has not",
        WHOLE,
        (
            "wrote no placeholder (id (7,))",
            "these are not the placeholders of its model",
        ),
        lambda at: at.table("whole/config.json", image_token_id=7),
    ),
]
