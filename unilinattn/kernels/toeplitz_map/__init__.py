"""The reduced map of convolutions: README.md derives it."""
