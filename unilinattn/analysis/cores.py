"""One of the core mixers of a layer, by its number."""

from unilinattn.errors import OptionError
from unilinattn.scoring.cores import Core, cores
from unilinattn.tracing.layer import Layer


def core_of(layer: Layer, index: int) -> Core:
    """Return the core number `index` of a layer; raise `OptionError` if it has fewer."""
    every = cores(layer)
    if not 0 <= index < len(every):
        raise OptionError(f"core={index} is out of range: {layer.name} has {len(every)} core mixers, numbered from 0.")
    return every[index]
