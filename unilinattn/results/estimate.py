"""`Estimate`: the memory and operations of a method before it runs."""

from dataclasses import dataclass

from unilinattn.memory import in_words


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer in a method: bytes allocated only during the layer, and multiply-adds."""

    name: str
    kind: str
    bytes: int
    operations: int


@dataclass(frozen=True, repr=False)
class Estimate:
    """Memory and operations of a method on one trace; prints as a table of its layers.

    The trace and its operators are not counted. If a method needs gradients, the first row is the model's forward
    and backward pass, which `max_memory` does not limit.

    Attributes:
        method: name of the method.
        shape: shape of the scores.
        result: bytes of the scores and of the result's extras.
        held: bytes in addition to the result from the first layer to the last.
        layers: cost of each layer, whose bytes are in addition to these and released before the next layer; preceded by
            the cost of the gradients, if any.
        allowed: bytes that `max_memory` allowed.
    """

    method: str
    shape: tuple[int, ...]
    result: int
    held: int
    layers: tuple[LayerCost, ...]
    allowed: int

    @property
    def beside(self) -> int:
        """Bytes allocated in addition to the result at the peak."""
        return self.held + max(layer.bytes for layer in self.layers)

    @property
    def operations(self) -> int:
        """Multiply-adds of all layers."""
        return sum(layer.operations for layer in self.layers)

    def __repr__(self) -> str:
        """Show the totals, then each layer on a line."""
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"Estimate of {self.method}: result {self.shape}, {in_words(self.result)}; {in_words(self.beside)} beside "
            f"it at the peak; {self.operations:.1e} multiply-adds; max_memory is {in_words(self.allowed)}"
        ]
        if self.held:
            lines.append(f"  {'all along':<{width}}  {in_words(self.held):>10}")
        for layer in self.layers:
            lines.append(
                f"  {layer.name:<{width}}  {in_words(layer.bytes):>10}  {layer.operations:>8.1e}  {layer.kind}"
            )
        return "\n".join(lines)
