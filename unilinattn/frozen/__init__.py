"""A host run as one affine map of its tokens."""
