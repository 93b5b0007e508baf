"""What passes and rows through a chain of stages hold and multiply, from what its mixers say of themselves."""

from collections.abc import Sequence

from unilinattn.mixers.base import Cost
from unilinattn.stages import Branch, Matrix, Mix, Scale, Stage, Unmapped


def pass_cost(chain: Sequence[Stage], tokens: int, channels: int, columns: int = 1) -> Cost:
    """Return what `run` or `run_adjoint` costs: `tokens` of all sequences, `channels` at the chain's beginning.

    Beside what its costliest mixer holds, a pass holds what enters a stage, what leaves it, and one product.
    """
    numbers, operations, _ = _walked(chain, tokens, channels, columns)
    return Cost(numbers, operations)


def rows_cost(chain: Sequence[Stage], tokens: int, channels: int, rows: int) -> Cost:
    """Return what so many rows of a per-channel chain's matrix cost: those of its mixers, weighed by the rest."""
    mixers = [stage.mixer for stage in _flat(chain) if isinstance(stage, Mix)]
    found = [mixer.rows_cost(rows) for mixer in mixers[-1:]] + [mixer.pass_cost(rows) for mixer in mixers[:-1]]
    every = tokens * channels * rows
    largest = max((cost.numbers for cost in found), default=0)
    return Cost(largest + 3 * every, sum(cost.operations for cost in found) + every * len(chain))


def _walked(chain: Sequence[Stage], tokens: int, channels: int, columns: int) -> tuple[int, int, int]:
    """Return the numbers held, the multiplications, and the channels at the end."""
    numbers, operations = tokens * channels * columns, 0
    for stage in chain:
        before = tokens * channels * columns
        within = 0
        if isinstance(stage, Matrix):
            operations += before * stage.weight.shape[0]
            channels = stage.weight.shape[0]
        elif isinstance(stage, Unmapped):
            channels = stage.width
        elif isinstance(stage, Scale):
            operations += before
        elif isinstance(stage, Mix):
            within, more = stage.mixer.pass_cost(channels * columns // stage.mixer.heads)
            operations += more
        elif isinstance(stage, Branch):
            parts = [_walked(inner, tokens, channels, columns) for inner in stage.chains]
            within = max(part[0] for part in parts) + before
            operations += sum(part[1] for part in parts)
            channels = parts[0][2]
        after = tokens * channels * columns
        numbers = max(numbers, before + within if within else before + 2 * after)
    return numbers, operations, channels


def _flat(chain: Sequence[Stage]) -> list[Stage]:
    return [part for stage in chain for part in (_branches(stage) if isinstance(stage, Branch) else [stage])]


def _branches(stage: Branch) -> list[Stage]:
    return [part for inner in stage.chains for part in _flat(inner)]
