"""The map of each head with weights per row and key: the square of a block of rows, and the writes before it."""
