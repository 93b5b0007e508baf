"""Two synthetic tasks whose answers, and the tokens that hold them, are known for every query."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError

NO_ANSWER = -100
"""Label of a position without an answer: the value that `torch.nn.functional.cross_entropy` ignores."""

TRAINING_SEEDS = range(0, 1_000_000)
"""Seeds of the training batches: step k of a training draws its batch with the k-th of them."""
SELECTION_SEED = 1_000_000
"""Seed of the sequences on which choices are made (which layer to show), never scored."""
HELD_OUT_SEED = 1_000_001
"""Seed of the sequences that are scored, never trained on and never used for a choice."""


@dataclass(frozen=True)
class TaskBatch:
    """Sequences of a task with their answers and with the keys that hold each answer.

    `labels[b, i]` is the token to predict at position i, so it is compared with `logits[b, i]` as it is
    (the `labels` argument of Hugging Face models shifts by one itself: do not pass these there);
    `NO_ANSWER` stands where nothing is asked. `relevant[b, i, j]` is true if key j is part of the known
    answer of query i; rows without an answer are false throughout.
    """

    input_ids: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    relevant: Bool[Tensor, "batch length length"]


@dataclass(frozen=True)
class Task(ABC):
    """A task with known answers: sequences of one length over one vocabulary, drawn from a seed."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, special ones included."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens in a sequence."""

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator) -> TaskBatch: ...

    def sample(self, count: int, seed: int) -> TaskBatch:
        """Draw `count` sequences that depend on the seed alone.

        Raises `InputError` if `count` is below one.
        """
        if count < 1:
            raise InputError(f"count is {count}; a batch needs at least one sequence: pass count >= 1.")
        return self._draw(count, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Copying(Task):
    """Repeat a random source after a separator (LaTIM 4.1 and B.1).

    A sequence is `source, separator, copy`: the source is drawn uniformly with replacement from
    `source_vocabulary` tokens, the separator has an id of its own (the last), and the copy is read as input
    (teacher forcing). Copy token t is predicted at the position before it: the separator for t = 0, copy
    token t - 1 after that; the last copy token asks nothing. The answer always lies `source_length` positions
    back, so that a fixed mixer can solve the task as well: it tells methods apart, not kinds of mixers.

    The keys known to be relevant are LaTIM's three main diagonals from source to copy (4.1, Table 2, D.1):
    for the query that predicts copy token t the source positions t - 1, t and t + 1, those outside the source
    dropped. Position t holds the answer; t - 1 holds the query's own token, by which the answer can be found;
    t + 1 is the next place that a short convolution carries the answer to.

    Raises `OptionError` if `source_length` is below one or `source_vocabulary` below two.
    """

    name: ClassVar[str] = "copying"
    source_length: int = 16
    source_vocabulary: int = 32

    def __post_init__(self) -> None:
        if self.source_length < 1 or self.source_vocabulary < 2:
            raise OptionError(
                f"source_length is {self.source_length} and source_vocabulary is {self.source_vocabulary}; "
                "accepted are source_length >= 1 and source_vocabulary >= 2."
            )

    @property
    def separator(self) -> int:
        """Id of the separator."""
        return self.source_vocabulary

    @property
    def vocabulary(self) -> int:
        """Number of token ids: the source's and the separator."""
        return self.source_vocabulary + 1

    @property
    def length(self) -> int:
        """Number of tokens in a sequence: source, separator and copy."""
        return 2 * self.source_length + 1

    def _draw(self, count: int, generator: torch.Generator) -> TaskBatch:
        n = self.source_length
        source = torch.randint(self.source_vocabulary, (count, n), generator=generator)
        separator = torch.full((count, 1), self.separator)
        labels = torch.full((count, self.length), NO_ANSWER)
        labels[:, n : 2 * n] = source
        position = torch.arange(self.length)
        query, key = position[:, None], position[None, :]
        answered = (query >= n) & (query < 2 * n)
        diagonals = answered & (key < n) & ((query - n - key).abs() <= 1)
        return TaskBatch(
            input_ids=torch.cat([source, separator, source], dim=1),
            labels=labels,
            relevant=diagonals.repeat(count, 1, 1),
        )


@dataclass(frozen=True)
class Induction(Task):
    """Recall what followed the current token when it last occurred (Induction 3.1, no special token).

    Tokens are drawn uniformly with replacement; the last one is drawn among those before it, so that it
    always has an answer. With v_i the current token and s the largest position before i that has v_s = v_i,
    the answer is v_{s+1}. The paper asks at the last position only; here every position whose token has
    occurred before is asked by the same rule. Where the answer lies depends on the tokens, which a fixed
    mixer (HMA ACL Theorem 1) cannot follow by mixing alone.

    The one key known to be relevant is s + 1. It holds the answer itself, and it is where the paper's
    mechanism stores and finds it: the bi-gram (v_s, v_{s+1}) enters the state when its second token is read
    (Induction 4.1), and the hidden attention map of the trained model points to the tokens right after
    earlier occurrences (Induction 5, Fig. 7). Position s only supplies the address, so it is not counted. If
    the current token repeats the one right before it, s + 1 is the query itself.

    Raises `OptionError` if `length` is below two or `vocabulary` below two.
    """

    name: ClassVar[str] = "induction"
    vocabulary: int = 16
    length: int = 48

    def __post_init__(self) -> None:
        if self.length < 2 or self.vocabulary < 2:
            raise OptionError(f"length is {self.length} and vocabulary is {self.vocabulary}; both must be 2 or more.")

    def _draw(self, count: int, generator: torch.Generator) -> TaskBatch:
        ids = torch.randint(self.vocabulary, (count, self.length), generator=generator)
        earlier = torch.randint(self.length - 1, (count, 1), generator=generator)
        ids[:, -1:] = ids.gather(1, earlier)
        position = torch.arange(self.length)
        occurred = (ids[:, :, None] == ids[:, None, :]) & (position[:, None] > position)
        last = torch.where(occurred, position, -1).amax(dim=-1)
        answered = last >= 0
        labels = torch.where(answered, ids.gather(1, last + 1), NO_ANSWER)
        relevant = answered[:, :, None] & (position == last[:, :, None] + 1)
        return TaskBatch(input_ids=ids, labels=labels, relevant=relevant)


TASKS: dict[str, Task] = {task.name: task for task in (Copying(), Induction())}
"""The tasks that models were trained for, by name, at the sizes they were trained on."""
