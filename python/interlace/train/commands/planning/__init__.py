"""``interlace plan`` and ``interlace simulate``: layouts, timelines, dispatch, node failures."""
