"""What the commands of the CLI do, a module each; only `interlace.cli` imports them.

train.py       starts the ranks of a config, or is one        planning.py    plan and simulate
generate.py    one answer from a checkpoint                   doctor.py      what this machine can run, and why not
mask.py        the attention mask of a batch                  crash.py       doctor --crash: who waited for whom
export.py      a checkpoint as HuggingFace loads it           elastic.py     coordinator, and a node of an elastic run
"""
