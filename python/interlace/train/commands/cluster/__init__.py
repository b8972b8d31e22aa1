"""``interlace doctor --distributed``: facts, links and collectives of every node, compared."""
