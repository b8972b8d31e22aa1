"""parallel.plan = "auto"."""
