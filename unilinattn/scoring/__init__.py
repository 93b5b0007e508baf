"""Maps and vectors of layers, their products, and labelled results, which several methods use."""
