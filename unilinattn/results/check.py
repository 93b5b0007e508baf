"""`Check`: the fall of an explained value with other tokens in place of the most important ones, or of random ones."""

from dataclasses import dataclass

from unilinattn.results.intervals import MeanInterval

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
"""Words of small numbers of tokens."""

SMALLEST = 1e-4
"""Falls below this are zero in sentences: rounding of the model in float32."""


@dataclass(frozen=True)
class Falls:
    """The fall of a value when tokens are replaced, a mean over draws.

    Attributes:
        top: the fall with other tokens in place of the tokens with the largest scores.
        random: the fall with other tokens in place of tokens drawn at random among the rest.
        difference: `top` less `random`, with the 95 % bootstrap interval over draws.
    """

    top: float
    random: float
    difference: MeanInterval


@dataclass(frozen=True)
class Check:
    """Whether the tokens with the largest scores carry the explained value of a sequence (see `Attribution.check`).

    Attributes:
        name: the explained value: "the logit", "the log-odds", "the output" of a regression, "the difference of two
            logits" (or outputs) or "the function of the output".
        keys: the keys of the replaced tokens with the largest scores, the largest first.
        draws: number of draws of ids, and of random tokens.
        seed: seed of the random numbers.
        value: the falls of the explained value.
        log_p: the falls of the log probability, in nats, of the token or class whose logit is explained; None for a
            difference, a function, and a regression.
    """

    name: str
    keys: tuple[int, ...]
    draws: int
    seed: int
    value: Falls
    log_p: Falls | None = None

    @property
    def top(self) -> int:
        """The number of tokens that are replaced at once."""
        return len(self.keys)

    @property
    def sentence(self) -> str:
        """The two falls in words, of the log probability if there is one; with the interval if it contains 0."""
        name, falls = (self.name, self.value) if self.log_p is None else ("log p", self.log_p)
        top, random = "top token", "a random one"
        if self.top > 1:
            count = NUMBERS[self.top] if self.top < len(NUMBERS) else str(self.top)
            top, random = f"top {self.top} tokens", f"{count} random ones"
        low, high = falls.difference.low, falls.difference.high
        doubt = f", a difference of {_number(low)} to {_number(high)} at 95 %, which may be none"
        return (
            f"replacing the {top} lowers {name} by {_number(falls.top)}, {random} by {_number(falls.random)} "
            f"({self.draws} draws{doubt if low <= 0 <= high else ''})"
        )


def _number(value: float) -> str:
    if abs(value) < SMALLEST:
        return "0"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"
