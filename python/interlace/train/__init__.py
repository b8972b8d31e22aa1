"""The trainer: config, model building, optimizer, checkpoints, the loop, and the launcher of local ranks.

    schema.py      the sections and keys of a config          config.py      TOML + --set -> checked Config
    build.py       Config -> MultimodalModel, datasets        optim.py       AdamW per module, warm-up + cosine
    checkpoint.py  atomic, re-layoutable checkpoints          launch.py      spawns and watches local ranks
    trainer.py     the loop of one rank                       metrics.py     console, JSONL, TensorBoard
    peers.py       what ranks tell each other        runfolder.py   the files of a run
    generate.py    greedy answers from a model                report.py      summary table, page of samples

Nothing here is imported by the rest of the package but `cli`; import the modules directly
(``from interlace.train.config import load``): the package itself loads none of them, so that the CLI starts fast.
"""
