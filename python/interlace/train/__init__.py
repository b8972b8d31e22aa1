"""The trainer: config, model building, optimizer, checkpoints, the loop, and the launcher of local ranks.

    schema.py      the sections and keys of a config          config.py      TOML + --set -> checked Config
    build.py       Config -> MultimodalModel, datasets        optim.py       AdamW per module, warm-up + cosine
    checkpoint.py  atomic, re-layoutable checkpoints          launch.py      spawns and watches local ranks
    checkpointfolder.py  which checkpoints are whole          storage.py     their files: safetensors and JSON
    trainer.py     the loop of one rank                       metrics.py     console, JSONL, TensorBoard
    peers.py       what ranks tell each other                 runfolder.py   the files of a run
    lock.py        one job at a time in a run folder          errors.py      TrainingError
    generate.py    greedy answers from a model                report.py      summary table, page of samples

Nothing here is imported by the rest of the package but `cli`; import the modules directly
(``from interlace.train.config import load``): the package itself loads none of them, so that the CLI starts fast.
"""
