"""`Observer`: receives the intermediate results of an evaluation."""

from collections.abc import Sequence

from unilinattn.errors import UnilinattnError
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace


class Observer:
    """Receives the intermediate results of an evaluation of one model; the methods of this class ignore them."""

    def traced(self, trace: Trace) -> None:
        """Receive the trace of each batch of the data."""

    def scored(self, trace: Trace, label: str, result: Attribution) -> Attribution:
        """Receive the result of a row on a batch of the data, and return the result to measure."""
        return result

    def chosen(self, label: str, by_layer: Sequence[float]) -> None:
        """Receive the metric of each layer of a row on the selection samples."""

    def refused(self, label: str, error: UnilinattnError) -> None:
        """Receive the error of a row; the row is left out of the table, unless this raises the error."""
        raise error
