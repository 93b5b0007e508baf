"""What methods share: maps and vectors of layers, their products, and labelled results."""
