"""Cost of every operation relative to its floor, measured in one run: `python -m benchmarks`."""
