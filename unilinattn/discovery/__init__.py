"""Search of a model for the modules that mix tokens, and its completeness."""
