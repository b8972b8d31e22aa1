"""Pictures of simulated steps and runs as SVG: timelines, layouts, loads, recoveries."""
