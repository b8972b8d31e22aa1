"""parallel.layout = "auto"."""
