"""Answers of models to questions, and metrics of the scores that explain them, also if they are wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from evidence.questions import Questions
from unilinattn.evaluation import Case, RowScores, Sample
from unilinattn.evaluation.case import ranked, rankings
from unilinattn.evaluation.measures import Measurement, Metric
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.host.substitution import through_operators

SCORED_LENGTHS = (48, 64, 80, 96)
"""Lengths of the scored contexts."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question.

    Attributes:
        ids: the tokens up to the query, of shape (1, length).
        context: number of tokens of the context.
        answer, predicted: the right token, and the model's.
        name: the length of the context, and the question's number.
        of: the length and the number of the context.
    """

    ids: Int[Tensor, "1 length"]
    context: int
    answer: int
    predicted: int
    name: str
    of: tuple[int, int] = (0, 0)

    @property
    def right(self) -> bool:
        """Whether the model's token is the right one."""
        return self.answer == self.predicted

    @property
    def in_context(self) -> bool:
        """Whether the predicted token is one of the context."""
        return bool((self.ids[0, : self.context] == self.predicted).any())

    @property
    def sample(self) -> Sample:
        """The question with the keys of the context that hold the predicted token as the relevant ones."""
        context = torch.arange(self.ids.shape[1]) < self.context
        relevant = context & (self.ids[0] == self.predicted)
        return Sample(
            inputs=self.ids, target=-1, relevant=relevant, valid=context, label=self.answer, name=self.name
        )  # fmt: skip


@torch.no_grad()
def answers(host: nn.Module, drawn: Questions) -> list[Answer]:
    """Return the answers of a model to all questions, context by context."""
    with through_operators(host):
        predicted = host(drawn.input_ids).logits.argmax(-1)
    return [
        Answer(
            drawn.input_ids[at : at + 1, : query + 1],
            drawn.context,
            int(drawn.labels[at, query]),
            int(predicted[at, query]),
            f"{drawn.context}-{number}",
            (drawn.context, at),
        )
        for number, (at, query) in enumerate((drawn.labels != NO_ANSWER).nonzero().tolist())
    ]


def of_all_lengths(
    host: nn.Module, draw: Callable[..., Questions], count: int, seed: int, *, step: int = 0
) -> list[Answer]:
    """Return the answers for `count` contexts of each scored length, the lengths in turn.

    `step`: difference of the seeds of two lengths; contexts that are drawn from one seed share words.
    """
    by_length = [
        answers(host, draw(count, seed + step * index, length=length)) for index, length in enumerate(SCORED_LENGTHS)
    ]
    return [answer for group in zip(*by_length, strict=True) for answer in group]


def one_of_each_context(every: Sequence[Answer]) -> list[Answer]:
    """Return one answer of each context, the questions in turn."""
    contexts: dict[tuple[int, int], list[Answer]] = {}
    for answer in every:
        contexts.setdefault(answer.of, []).append(answer)
    return [questions[number % len(questions)] for number, questions in enumerate(contexts.values())]


def _of_both(name: str, combined: Callable[[RowScores, RowScores], float]) -> Metric:
    """Return a metric of the rankings of the keys that hold the predicted token and of those that hold the answer."""

    def measure(cases: Sequence[Case]) -> list[Measurement]:
        answers = [case.valid & (case.sample.inputs[0] == case.sample.label) for case in cases]
        pairs = zip(rankings(cases), ranked(cases, answers), strict=True)
        return [Measurement.mean(combined(*pair)) for pair in pairs]

    return Metric(name, measure, of_batch=True)


OF_ANSWERS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _of_both("answer_ap", lambda predicted, right: right.ap),
        _of_both("answer_hit", lambda predicted, right: right.hit_at_1),
        _of_both("either_hit", lambda predicted, right: predicted.hit_at_1 + right.hit_at_1),
        _of_both("lead", lambda predicted, right: predicted.ap - right.ap),
    )
}
"""Metrics of wrong answers: the AP and the hit@1 for the keys of the right answer; the probability that the best key
holds the predicted token or the right answer; and the AP for the predicted token, less that for the right answer."""


def first_half(case: Case) -> float:
    """Return the share of the first half of the relevant keys in the absolute scores of both halves.

    One half if all these scores are zero, as at a layer of local attention.
    """
    scores = case.scores[case.relevant].abs().double()
    half = len(scores) // 2
    first, last = scores[:half].sum(), scores[len(scores) - half :].sum()
    return float(first / (first + last)) if first + last > 0 else 0.5
