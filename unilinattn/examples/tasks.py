"""Two synthetic tasks with a known answer, and known tokens that hold it, for every query."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError

NO_ANSWER = -100
"""Label of a position without an answer: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""

TRAINING_SEEDS = range(0, 1_000_000)
"""Seeds of the training batches: training step k draws its batch with the k-th seed."""
SELECTION_SEED = 1_000_000
"""Seed of the sequences for choices, such as the layer to show; they are never scored."""
HELD_OUT_SEED = 1_000_001
"""Seed of the scored sequences, which are never used for training or for a choice."""


@dataclass(frozen=True)
class TaskBatch:
    """Sequences of a task with their answers and the keys that hold each answer.

    Attributes:
        input_ids: the tokens.
        labels: `labels[b, i]` is the token to predict from `logits[b, i]`, or `NO_ANSWER`. Do not pass these as the
            `labels` argument of Hugging Face models, which shift them by one.
        relevant: `relevant[b, i, j]` is true if key j is part of the known answer of query i; rows without an answer
            are false.
    """

    input_ids: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    relevant: Bool[Tensor, "batch length length"]


@dataclass(frozen=True)
class Task(ABC):
    """A task with known answers: random sequences of one length over one vocabulary."""

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
        """Draw `count` sequences, which depend only on the seed.

        Raises `InputError` if `count` is below one.
        """
        if count < 1:
            raise InputError(f"count is {count}; a batch needs at least one sequence: pass count >= 1.")
        return self._draw(count, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Copying(Task):
    """Repeat a random source after a separator (LaTIM 4.1 and B.1).

    A sequence is `source, separator, copy`: the source is drawn uniformly with replacement from `source_vocabulary`
    tokens, the separator has the last id, and the copy is read as input (teacher forcing). Copy token t is predicted at
    the position before it: the separator for t = 0, copy token t - 1 for t > 0; the last copy token has no answer to
    predict. The answer always lies `source_length` positions back, so a fixed mixer can also solve the task: it
    distinguishes methods, not kinds of mixers.

    The only relevant key of the query that predicts copy token t is source position t, which holds the answer. LaTIM's
    pattern also counts its two neighbours: see `diagonals`.

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

    @property
    def diagonals(self) -> Bool[Tensor, "length length"]:
        """LaTIM's pattern of relevant keys, the same in every sequence: the three main diagonals (Table 2, D.1).

        For the query that predicts copy token t these are the source positions among t - 1, t and t + 1; t holds the
        answer and t - 1 the query's token. Replacing token t + 1 does not change the answer, so faithful scores rank
        it last: use the pattern only to reproduce LaTIM's table.
        """
        n, position = self.source_length, torch.arange(self.length)
        query, key = position[:, None], position
        return (query >= n) & (query < 2 * n) & (key < n) & ((query - n - key).abs() <= 1)

    def _draw(self, count: int, generator: torch.Generator) -> TaskBatch:
        n = self.source_length
        source = torch.randint(self.source_vocabulary, (count, n), generator=generator)
        separator = torch.full((count, 1), self.separator)
        labels = torch.full((count, self.length), NO_ANSWER)
        labels[:, n : 2 * n] = source
        position = torch.arange(self.length)
        answer = position[:, None] - n == position
        return TaskBatch(
            input_ids=torch.cat([source, separator, source], dim=1),
            labels=labels,
            relevant=(answer & (position < n)).repeat(count, 1, 1),
        )


@dataclass(frozen=True)
class Induction(Task):
    """Recall the token after the last occurrence of the current token (Induction 3.1, no special token).

    Tokens are drawn uniformly with replacement; the last one is drawn among those before it, so that it always has an
    answer. With v_i the current token and s the largest position before i that has v_s = v_i, the answer is v_{s+1}.
    The paper asks at the last position only; here every position whose token has occurred before has an answer, by the
    same rule. The answer's position depends on the tokens, which a fixed mixer (HMA ACL Theorem 1) cannot follow by
    mixing only.

    The only relevant key is s + 1. It holds the answer, and the paper's mechanism stores and finds it there: the
    bi-gram (v_s, v_{s+1}) enters the state when its second token is read (Induction 4.1), and the hidden attention map
    of the trained model points to the tokens right after earlier occurrences (Induction 5, Fig. 7). Position s only
    supplies the address, so it is not counted. If the current token repeats the one right before it, s + 1 is the
    query itself.

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
"""The tasks of the trained models by name, at their training sizes."""
