"""Rules of torch's functions: what a function does to the tensors that carry tokens, and which token an element is."""
