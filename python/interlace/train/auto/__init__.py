"""``parallel.plan = "auto"``: which layout, schedule and microbatches a run takes, and why.

candidates.py  what may be chosen, listed          work.py      the batches that candidates are tried with
proposals.py   what searches add for many ranks    machine.py   costs, links and memory
estimate.py    about how long a step takes         decide.py    lists, estimates, simulates, chooses
evaluate.py    a candidate, simulated              report.py    why, in words and as a picture
measured.py    layers timed on CPUs                links.py     gloo, timed
planlock.py    plan.lock                           settle.py    all of it for a config: what commands call
"""
