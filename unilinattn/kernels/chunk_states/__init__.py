"""The states between the chunks of a memory: README.md derives them."""
