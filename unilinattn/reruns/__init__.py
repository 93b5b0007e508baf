"""A traced model run again: without edges between tokens, or from other vectors of its tokens."""
