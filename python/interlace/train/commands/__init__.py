"""Commands of the CLI, one module each. Only `interlace.cli` imports them; it names them as "module:function".

- `train`, `generate`, `export`, `mask`. `elastic`: a coordinator, or a node of an elastic run.
- `data`, `stamps`: files of chats.
- `doctor`: capabilities of this machine. `crash`: report on a failed run. `cluster/`: checks of all nodes.
- `planning/`: plan and simulate. `tables`: tables on the terminal.
"""
