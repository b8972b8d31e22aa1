"""``interlace plan`` and ``interlace simulate``: layouts, steps, load balance, node failures."""
