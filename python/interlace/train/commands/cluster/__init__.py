"""``interlace doctor cluster``: facts, links and collectives of every node, compared."""
