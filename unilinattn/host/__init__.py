"""Run a host model: its inputs, its state during a run, records of its modules, and its outputs."""
