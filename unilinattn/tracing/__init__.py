"""Run a host model: record its token-mixing layers, check their operators, and restore the model."""
