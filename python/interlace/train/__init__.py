"""Trainer: builds model, data and layout from a config, then runs the same training loop on every rank.

- `config/`: sections and keys, TOML and --set. `models/`: model and layout of a config. `data/`: batches.
- `job`: the steps that make the training of a rank. `rank`: a rank of a fixed run. `trainer`: the training loop.
- `observers/`: measure, validate and save after steps. `progress`: state of the loop that a resumed run needs.
- `scheduling`: schedule of a config's steps, and memory of each rank.
- `optim`: optimizer and learning rates. `device`: GPU or CPU.
- `watching`: averages, early stop, loss scale. `runfolder`: files of a run. `selection`: selection of a checkpoint.
- `launch/`: starts ranks and coordinates them. `checkpoint/`: saving and resuming. `elastic/`: nodes that join and
  leave.
- `blame`: errors that the user can correct, from errors of libraries.
- `auto/`: `parallel = "auto"`. `report/`: metrics, trackers, pages. `commands/`: the CLI's commands.

Only `cli` imports this package. Import the modules directly (``from interlace.train.config.load import load``). The
package itself loads none of them, so that the CLI starts fast.
"""
