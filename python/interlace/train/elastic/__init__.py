"""Elastic runs: generations of ranks. Nodes may join and leave."""
