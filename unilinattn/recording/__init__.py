"""The functions that a module calls, recorded and compiled to the stages of its operator."""
