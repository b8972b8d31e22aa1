"""``parallel.plan = "auto"``: layout, schedule and microbatches of a run, chosen by simulation.

- `candidates`: the list of candidates. `proposals`: candidates from searches, for many ranks.
- `work`: batches for the simulation. `machine`: costs, links and memory.
- `estimate`: quick estimate of step time. `evaluate`: simulation of a candidate. `choose`: the best of all.
- `report`: reasons, as text and picture. `planlock`: plan.lock. `resolve`: the whole choice for a config.
"""
