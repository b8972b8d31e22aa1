"""The coordinator's decisions over a store of this process, by a clock that the test reads."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from interlace.resilience.authority import TOGETHER, Authority, Removal
from interlace.resilience.generation import Node
from interlace.resilience.member import READY
from interlace.resilience.settings import Settings


@pytest.mark.parametrize("first", ["ends", "is lost"])
def test_a_node_lost_as_others_end_ends_the_run(first: str) -> None:
    """Whichever comes first: who has trained to the end cannot be in a generation that follows."""
    store = dist.HashStore()
    settings = Settings(nodes=3, faults=0, min_nodes=1, heartbeat=5.0, gather=60.0)
    authority = Authority(settings, store, lambda what, **values: None, 0.0)
    for name in "abc":
        authority.came(Node(name, 1, "here"))
        store.add(f"{READY}/{name}", 1)
    authority.decide({}, 0.0, 0.0)
    assert authority.has("a") and authority.has("b") and authority.has("c")
    steps = [lambda: authority.finish("a"), lambda: authority.lose(Removal("b", "death", "it is gone"), 1.0)]
    for step in steps if first == "ends" else reversed(steps):
        step()
    authority.decide({}, 1.0 + 2 * TOGETHER, 0.0)
    assert authority.over and "when others had ended already" in authority.ended
