"""The trainer: a config becomes a model, data and a layout, and every rank runs the same loop over them.

    schema.py      the sections and keys of a config, with schema_train.py ([train]) and schema_base.py
    config.py      TOML + --set -> checked Config
    build.py       Config -> MultimodalModel, Layout          costs.py       FLOPs of a config's layers
    feed.py        every batch, as all ranks see it           optim.py       optimizers and schedules
    tuning.py      what trains, and how fast                  watching.py    averages, early stop, scale of fp16
    trainer.py     the loop of one rank                       rank.py        one rank from start to end
    metrics.py     console, JSONL, TensorBoard                runfolder.py   the files of a run
    frozen.py      frozen weights in bf16                     flops.py       TFLOP/s and MFU
    answers.py     greedy answers to held-out samples         report.py      summary table, page of samples
    errors.py      TrainingError
    launch/        starts ranks and keeps them together       checkpoint/    what a run goes on from
    commands/      what each command of the CLI does

Nothing here is imported by the rest of the package but `cli`; import the modules directly
(``from interlace.train.config import load``): the package itself loads none of them, so that the CLI starts fast.
"""
