"""Trainer: builds model, data and layout from a config, then runs the same training loop on every rank.

- `config/`: sections and keys, TOML and --set. `models/`: model and layout of a config. `data/`: batches.
- `trainer`: training loop of one rank. `rank`: a rank from start to end. `optim`: optimizers and learning rates.
- `watching`: averages, early stop, loss scale. `runfolder`: files of a run. `selection`: selection of a checkpoint.
- `launch/`: starts ranks and coordinates them. `checkpoint/`: saving and resuming. `elastic/`: nodes that join and
  leave.
- `auto/`: `parallel = "auto"`. `report/`: metrics, trackers, pages. `commands/`: the CLI's commands.

Only `cli` imports this package. Import the modules directly (``from interlace.train.config.load import load``). The
package itself loads none of them, so that the CLI starts fast.
"""
