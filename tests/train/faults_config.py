"""Faults in configs and command lines. Invalid models and numbers are swept in test_hostile_models and
test_hostile_config. Here each kind of mistake goes through the command that a user runs.
"""

from __future__ import annotations

import json

from tests.train.faults import Fault

OWN = "tests.train.own_modules"
TRAIN = "train {at}/own.toml"
WHOLE = "train {at}/whole.toml"


def _set(*settings: str, base: str = TRAIN) -> str:
    return " ".join([base, *(f"'--set={setting}'" for setting in settings)])


CONFIG = [
    Fault("no such config", "train {at}/gone.toml", ("gone.toml: cannot read the config: No such file",)),
    Fault("a folder as config", "train {at}/pictures", ("pictures: cannot read the config: Is a directory",)),
    Fault(
        "a config in another encoding",
        TRAIN,
        ("own.toml: not a text file in UTF-8",),
        lambda at: at.write("own.toml", "# caf\u00e9".encode("latin-1")),
    ),
    Fault("no TOML", TRAIN, ("own.toml: not valid TOML", "line 3"), lambda at: at.edit("own.toml", '"own"', '"own')),
    Fault(
        "a key twice", TRAIN, ("not valid TOML",), lambda at: at.edit("own.toml", "steps = 2", "steps = 2\nsteps = 3")
    ),
    Fault("an unknown key", _set("train.step=3"), ("[train] has no key 'step'; did you mean 'steps'?",)),
    Fault(
        "a misspelt section",
        TRAIN,
        ("own.toml: the top level has no key 'parrallel'; did you mean 'parallel'?",),
        lambda at: at.edit("own.toml", "[parallel]", "[parrallel]"),
    ),
    Fault(
        "a missing section",
        TRAIN,
        ("has no key 'train_more'; did you mean 'train'?",),
        lambda at: at.edit("own.toml", "[train]", "[train_more]"),
    ),
    Fault(
        "a missing key",
        TRAIN,
        ("[train] misses the key 'batch_size'",),
        lambda at: at.edit("own.toml", "batch_size = 4\n", ""),
    ),
    Fault("a text for a number", _set('train.steps="many"'), ("train.steps should be a valid integer", "'many'")),
    Fault("a number out of range", _set("train.lr=-1"), ("train.lr should be greater than or equal to 0",)),
    Fault("a value for a section", _set("train=5"), ("train must be a section (a table)",)),
    Fault(
        "a section for a value",
        _set("train.lr.vision=5"),
        ("--set train.lr.vision=5: train.lr should be a valid number",),
    ),
    Fault("--set without a value", _set("train.steps"), ("write it as section.key=value",)),
    Fault("steps and epochs", _set("train.epochs=2"), ("give steps or epochs, one of the two: there are both",)),
    Fault("an unknown choice", _set("train.schedule=cosinus"), ("did you mean 'cosine'?",)),
    Fault("a warm-up longer than the run", _set("train.warmup_steps=9"), ("warmup_steps = 9 is more than steps = 2",)),
    Fault("an unknown architecture", _set("model.vision.architecture=SiglipVisionMdoel"), ("did you mean 'SiglipVi",)),
    Fault("a key that its class has not", _set("model.vision.config.hiden_size=8"), ("did you mean 'hidden_size'?",)),
    Fault("a projector that cannot be imported", _set("model.vision.projector=nowhere.at:All"), ("cannot import",)),
    Fault("a projector that raises", _set(f"model.vision.projector={OWN}:Raises"), ("cannot be made", "no such luck")),
    Fault(
        "a callback that raises",
        _set(f"model.vision.postprocess={OWN}:raises"),
        ("the callback postprocess = raises raised KeyError: 'pooled'",),
        code=1,
    ),
    Fault(
        "a freeze pattern for nothing",
        _set('train.freeze=["visoin"]'),
        ("freeze: 'visoin' matches nothing in the model", "nearest name is 'vision'"),
    ),
    Fault(
        "a train pattern for nothing",
        _set('train.train=["*.layres.*"]'),
        ("train: '*.layres.*' matches nothing in the model", "nearest name is 'layers'"),
    ),
    Fault(
        "a group for nothing",
        _set('train.groups=[{pattern="visoin",lr=1.0}]'),
        ("groups: 'visoin' matches nothing in the model", "nearest name is 'vision'"),
    ),
    Fault("nothing left to train", _set('train.freeze=["*"]'), ("freeze all parameters; train at least a projector",)),
    Fault(
        "a LoRA target for nothing",
        _set('train.lora.targets=["q_prjo"]'),
        ("'q_prjo' matches nothing in the model; the nearest name is 'q_proj'",),
    ),
    Fault(
        "LoRA of a module that is no linear layer",
        _set('train.lora.targets=["embed_tokens"]'),
        ("'embed_tokens' matches no linear layer (torch.nn.Linear)",),
    ),
    Fault(
        "heads that tp does not divide",
        _set("parallel.language_model.tp=3", base="plan {at}/own.toml"),
        ("has 2 heads, not divisible by 3 ranks: use a number of ranks that divides 2",),
        lambda at: at.edit("own.toml", "ranks = 1\n", ""),
    ),
    Fault(
        "more stages than layers",
        _set("parallel.language_model.pp=3", base="plan {at}/own.toml"),
        ("language_model: pp=3 stages, but only 1 layers: set pp to at most 1",),
    ),
    Fault("an encoder that the model has not", _set("parallel.visoin.pp=2"), ("did you mean [parallel.vision]?",)),
    Fault(
        "a batch smaller than its parts",
        _set("train.batch_size=1"),
        ("microbatches = 2 is more than batch_size = 1; a microbatch needs at least one",),
    ),
    Fault(
        "a GPU that is not there",
        _set("run.device=cuda"),
        (
            "run.device is 'cuda', which needs a GPU for each",
            "set run.device = 'cpu'",
        ),
    ),
    Fault("a run folder below a file", _set("run.folder={at}/train.jsonl"), ("cannot make the run folder",)),
    Fault("a run folder that may not be written", _set("run.folder=/proc/runs"), ("cannot make the run folder",)),
    Fault(
        "a cache below a file",
        _set("data.cache={at}/train.jsonl"),
        ("train.jsonl/chats: Not a directory; set data.cache to a folder that can be written",),
    ),
    Fault(
        "a run name with a slash",
        _set("run.name=a/b"),
        ("run.name String should match pattern", "not the string 'a/b'"),
    ),
    Fault(
        "a model folder that is not there",
        _set("model.path={at}/gone", base=WHOLE),
        ("gone: no such folder; models are read from local folders only: download it first",),
    ),
    Fault(
        "a file as model folder",
        _set("model.path={at}/train.jsonl", base=WHOLE),
        ("train.jsonl is a file: give a folder written by HuggingFace's save_pretrained",),
    ),
    Fault(
        "a name on a hub",
        _set("model.path=llava-hf/llava-1.5-7b-hf", base=WHOLE),
        ("llava-1.5-7b-hf: no such folder; models are read from local folders only: download it first",),
    ),
    Fault(
        "a GGUF file",
        _set("model.path={at}/model.gguf", base=WHOLE),
        ("model.gguf is a GGUF file for inference: give a folder",),
        lambda at: at.write("model.gguf", b"GGUF" + bytes(60)),
    ),
    Fault(
        "a folder of GGUF files",
        _set("model.path={at}/gguf", base=WHOLE),
        ("gguf has GGUF files for inference: give a folder",),
        lambda at: at.write("gguf/model.gguf", b"GGUF" + bytes(60)),
    ),
    Fault(
        "a folder of an adapter",
        _set("model.path={at}/adapter", base=WHOLE),
        ("adapter is a peft adapter of base, not a model: merge it into the base model",),
        lambda at: at.write("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "base"})),
    ),
    Fault(
        "a language model as whole model",
        _set("model.path={at}/language", base=WHOLE),
        (
            "has LlamaForCausalLM, which is not a vision- or audio",
            "use it as [model.NAME] path",
        ),
    ),
    Fault(
        "an encoder as whole model",
        _set("model.path={at}/encoder", base=WHOLE),
        (
            "has SiglipVisionModel, which is not a vision-",
            "use it as [model.NAME] path",
        ),
    ),
    Fault(
        "a language model as encoder",
        _set("model.vision.path={at}/language", base="train {at}/parts.toml"),
        ("language/config.json has model_type = 'llama', of which no class takes images",),
    ),
    Fault("no tokenizer", _set("data.tokenizer={at}/pictures"), ("no tokenizer can be loaded",)),
    Fault(
        "no tokenizer given",
        TRAIN,
        ("the model comes from no folder, so name one with a tokenizer as data.tokenizer",),
        lambda at: at.edit("own.toml", f'tokenizer = "{at.at}/tokenizer"\n', ""),
    ),
    Fault(
        "a tokenizer larger than the vocabulary",
        "train {at}/parts.toml",
        (
            "/language has embeddings of 64 tokens, but the tokenizer has ",
            "set data.tokenizer to its own tokenizer",
        ),
        lambda at: at.table("language/config.json", vocab_size=64),
    ),
    Fault(
        "a template without the assistant's turn",
        _set("data.chat_template={at}/a.jinja"),
        ("a.jinja cannot be used: the answers have no tokens that could be learnt; a template for questions",),
        lambda at: at.write("a.jinja", "{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}{% endfor %}"),
    ),
    Fault(
        "a template that raises",
        _set("data.chat_template={at}/a.jinja"),
        ("a.jinja cannot be used: the chat template refuses it: no chats today; a template for questions",),
        lambda at: at.write("a.jinja", "{{ raise_exception('no chats today') }}"),
    ),
    Fault(
        "a template that is none",
        _set("data.chat_template={at}/a.jinja"),
        ("a.jinja: no chat template: Unexpected end of template",),
        lambda at: at.write("a.jinja", "{% for m in messages %}"),
    ),
    Fault(
        "a template that leaves pictures out",
        _set("data.chat_template={at}/a.jinja"),
        (
            "train.jsonl:1: its text has 0 placeholder tokens",
            "or the template leaves media out",
        ),
        lambda at: at.write(
            "a.jinja",
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | replace('<image>', '') }}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ),
    ),
    Fault(
        "a template that rewrites earlier turns",
        _set("data.chat_template={at}/a.jinja"),
        (
            "a.jinja: the text of a chat's first 2 turns is not how the text of the whole",
            "mark them in the template with {% generation %}",
        ),
        lambda at: at.write(
            "a.jinja",
            "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ),
    ),
    Fault("more tokens than positions", _set("data.max_tokens=4096"), ("positions for 512",)),
    Fault(
        "no held-out share",
        _set("data.validation=[]", "data.held_out=0.0"),
        ("data.held_out should be greater than 0",),
    ),
    Fault(
        "validation data that are the training data",
        _set('data.validation=["{at}/train.jsonl"]'),
        ("8 of 8 records for validation are among those for training", "name other files"),
        code=0,
    ),
    Fault(
        "a picture outside of what the config says",
        _set("data.media={at}/gone"),
        (
            "no sample is left of 8; the first, ",
            "gone/pictures/0.png: no such file",
        ),
    ),
    Fault(
        "checkpoint.best without validations",
        _set("checkpoint.best=loss", "train.validate_every=0"),
        ("checkpoint.best = 'loss' goes by validations: set train.validate_every",),
    ),
    Fault(
        "fewer samples than a batch",
        _set("train.batch_size=64", "train.microbatches=2", "data.drop_last=true"),
        ("the dataset has 8 samples, one batch needs 64; make batch_size smaller, or leave out drop_last",),
    ),
    Fault("no training data", _set("data.train=[]"), ("dataset 'chats' needs train",)),
    Fault(
        "rows that are no microbatches", _set("data.pack=true"), ("train.batch_size = 4 must be train.microbatches",)
    ),
    Fault("a data file that is not there", _set('data.train=["{at}/gone.jsonl"]'), ("gone.jsonl: no such file",)),
    Fault(
        "a data file of another kind",
        _set('data.train=["{at}/own.toml"]'),
        ("own.toml: of no known kind; give .jsonl, .json, .parquet",),
    ),
    Fault(
        "a data file twice", _set('data.train=["{at}/train.jsonl","{at}/train.jsonl"]'), ("train.jsonl: named twice",)
    ),
    Fault("an empty data file", TRAIN, ("the files are empty",), lambda at: at.write("train.jsonl", "")),
    Fault(
        "a list in a file of lines",
        TRAIN,
        ("train.jsonl: is one JSON list: name it .json",),
        lambda at: at.write("train.jsonl", "[\n{}\n]"),
    ),
    Fault(
        "a folder of pictures as data",
        _set('data.train=["{at}/pictures"]'),
        ("a folder that neither datasets' save_to_disk",),
    ),
    Fault(
        "a tokenizer folder that is not there", _set("data.tokenizer={at}/gone"), ("gone: no such folder; name one",)
    ),
    Fault("a template that is not there", _set("data.chat_template={at}/gone"), ("the chat template cannot be read",)),
    Fault(
        "all samples too long", _set("data.max_tokens=4"), ("no sample is left of 8", "more than data.max_tokens = 4")
    ),
    Fault(
        "a broken record where none may be",
        _set("data.on_broken=error"),
        ("train.jsonl:9: every answer has weight 0", "mend it, or set data.on_broken"),
        lambda at: at.write(
            "train.jsonl",
            (at.at / "train.jsonl").read_text()
            + '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
        ),
    ),
    Fault(
        "an unknown rule for long samples",
        _set("data.on_too_long=shorten"),
        ("data.on_too_long should be 'cut', 'skip' or 'error'",),
    ),
    Fault(
        "keys of chats for another dataset",
        _set("data.dataset='mine:Data'", "data.on_broken=error"),
        ("on_broken is a key of dataset 'chats', not of 'mine:Data'",),
    ),
    Fault("a dataset of earlier versions", _set("data.dataset=digits"), ("there is no dataset 'digits'",)),
    Fault("a key that is gone", _set("data.digit_size=16"), ("[data] has no key 'digit_size'",)),
    Fault(
        "a placeholder that is a word",
        _set('data.placeholders={vision="a"}'),
        ("the placeholder 'a' is a piece of words for this tokenizer: name a special token",),
    ),
    Fault(
        "a placeholder of no encoder",
        _set('data.placeholders={eyes="<eye>"}'),
        ("data.placeholders names 'eyes'; the encoders are vision",),
    ),
    Fault("--take-over without --resume", TRAIN + " --take-over", ("name it with --resume",)),
    Fault("no config at all", "train", ("train needs a config",)),
    Fault("two configs to check", "data check {at}/own.toml {at}/whole.toml", ("give one config",)),
    Fault("a page over the data", "data check {at}/train.jsonl --out {at}/train.jsonl", ("which is read",)),
    Fault("a page nowhere", "data check {at}/train.jsonl --out {at}/gone/page.html", ("cannot write there",)),
    Fault(
        "a timeline below a file", "simulate {at}/own.toml --tflops 1 --out {at}/train.jsonl", ("cannot write there",)
    ),
]
