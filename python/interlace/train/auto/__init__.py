"""``parallel.layout = "auto"``: layout, schedule and microbatches of a run, chosen by simulation.

- `candidates`: the list of candidates. `proposals`: candidates from searches, for many ranks.
- `work`: batches for the simulation. `machine`: costs, links and memory.
- `estimate`: quick estimate of step time. `evaluate`: simulation of a candidate. `choose`: the best of all.
- `report`: reasons, as text and picture. `layout_file`: layout.toml.
- `resolve`: the whole choice for a config. `agree`: the same for all ranks of torchrun.
"""
