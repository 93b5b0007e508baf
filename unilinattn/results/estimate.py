"""`Estimate`: the memory of a method before it runs."""

from dataclasses import dataclass

from unilinattn.memory import in_words


@dataclass(frozen=True)
class LayerCost:
    """Bytes that a method allocates only during one layer, or during one run of the model."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True, repr=False)
class Estimate:
    """Memory of a method on one trace; prints as a table of its layers.

    `max_memory` limits neither the trace with its operators, nor the forward and backward pass of a method that needs
    gradients, which is the first row.

    Attributes:
        method: name of the method.
        shape: shape of the scores.
        result: bytes of the scores and of the result's extras.
        held: bytes in addition to the result from the first layer to the last.
        layers: cost of each layer, whose bytes are in addition to these and released before the next layer; preceded by
            the cost of the gradients, if any.
        allowed: bytes that `max_memory` allowed.
        trace: bytes of the trace and of its operators, which stay for later methods. Parameters of the model are not
            counted.
    """

    method: str
    shape: tuple[int, ...]
    result: int
    held: int
    layers: tuple[LayerCost, ...]
    allowed: int
    trace: int = 0

    @property
    def beside(self) -> int:
        """Bytes allocated in addition to the result at the peak."""
        return self.held + max(layer.bytes for layer in self.layers)

    def __repr__(self) -> str:
        """Show the totals, then each layer on a line."""
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"Estimate of {self.method}: result {self.shape}, {in_words(self.result)}; {in_words(self.beside)} beside "
            f"it at the peak; trace and operators {in_words(self.trace)}; max_memory is {in_words(self.allowed)}"
        ]
        if self.held:
            lines.append(f"  {'all along':<{width}}  {in_words(self.held):>10}")
        for layer in self.layers:
            lines.append(f"  {layer.name:<{width}}  {in_words(layer.bytes):>10}  {layer.kind}")
        return "\n".join(lines)
