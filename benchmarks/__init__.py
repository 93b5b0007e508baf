"""What every operation costs beside its floor, measured in one run: `python -m benchmarks`."""
