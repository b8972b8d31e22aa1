"""A training that loses nodes goes on, and takes new ones in (dissertation chapter 2, Oobleck).

Between nodes: generation.py (who trains together: plain data) · settings.py (what all nodes agree on) ·
supervisor.py (one per node: starts ranks, sees them end) · watch.py (and hang) · wire.py (what it tells the
coordinator) · coordinator.py (one per run: connections) · authority.py (who is lost, when a generation is over) ·
roster.py (which follows) · faults.py (who is at fault among ranks that wait for each other).
In a rank: member.py (its generation, votes on steps) · progress.py (what it does) · environment.py (who it is).

Supervisors import no torch: modules that do are member, coordinator and authority.
"""
