"""The reduced map of heads with one decay each: README.md derives it."""
