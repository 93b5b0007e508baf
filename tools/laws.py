"""`python -m tools.laws [PATTERN]`: laws of results, with every method on the models of the sweep that work.

The oracle is the host: what it computes on other inputs tells what scores have to be. A message names the class, the
method and the law that does not hold (see `LAWS`). Exit code 1 means that there is one.
"""

import argparse
import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tools.sweep_pages import read_record
from tools.sweep_run import Case, prepared, run
from unilinattn import Attribution, explain, trace
from unilinattn.errors import UnilinattnError
from unilinattn.evaluation.checkpoints import quiet_hosts
from unilinattn.host.logits import logits_in
from unilinattn.testing import promoted

METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("logit", "lrp", "attn_lrp", "alti_logit", "gradient", "input_x_gradient", "contribution")},
    **{name: {} for name in ("attribution", "attention_grad", "transformer_attribution", "rollout")},
    **{name: {} for name in ("knockout", "occlusion")},
    **{name: {"compose": "rollout"} for name in ("alti", "latim")},
}
"""The methods, with options by which each returns one score for each token."""

SHARES = ("logit", "lrp", "attn_lrp", "input_x_gradient", "occlusion")
"""Methods that give a score to every token at which the logit has a gradient."""

SECONDS = 120
"""Seconds of CPU time for the methods of a model."""

EXACT, ROUNDED = 1e-9, 2e-4
"""Largest differences in float64, and for hosts whose kernels need float32."""

WORDS = (11, 37, 62)
"""Ids of ordinary tokens in place of another."""


@dataclass
class Subject:
    """A model with its inputs, and what methods return on them.

    Attributes:
        model: the model.
        inputs: its keyword arguments, of one sequence.
        limit: the largest relative difference of numbers that are the same.
        explained: returns the result of a method: `explained(inputs, method, target)`.
        results: the results by target and method.
        refusals: the texts of refusals by target and method.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    limit: float
    explained: Callable[[Mapping[str, Any], str, int], Attribution]
    results: dict[tuple[int, str], Attribution] = field(default_factory=dict)
    refusals: dict[tuple[int, str], str] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor | None:
        """The ids of a text, None for other inputs and for those of a decoder."""
        ids = self.inputs.get("input_ids")
        return ids if isinstance(ids, Tensor) and ids.ndim == 2 and "decoder_input_ids" not in self.inputs else None

    def logits(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the host's logits on inputs, None if it fails on them or has none."""
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                return logits_in(self.model(**inputs))
        # A host may accept no other inputs than those that it was built for.
        except Exception:
            return None

    def tried(self, inputs: Mapping[str, Any], method: str, target: int) -> Attribution | str:
        """Return the result of a method, or the text of its error."""
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.explained(inputs, method, target)
        except UnilinattnError as error:
            return str(error)


def finite(subject: Subject) -> Iterator[str]:
    """Scores are finite, and shares add up to the logit."""
    for (target, method), result in subject.results.items():
        gap = result.completeness_gap
        if not bool(result.scores.isfinite().all()):
            yield f"{method} at {target}: not finite"
        if gap is not None and not gap <= subject.limit:
            yield f"{method} at {target}: a gap of {gap:.0e}"


def influence(subject: Subject) -> Iterator[str]:
    """A token that moves no logit has a score of zero, and one that moves it along a gradient has a share."""
    ids, whole = subject.ids, subject.logits(subject.inputs)
    if ids is None or whole is None or len(ids) != 1:
        return
    of_tokens = [
        (target, method, result.scores[0])
        for (target, method), result in subject.results.items()
        if result.dims == ("batch", "key") and result.scores.shape == ids.shape
    ]
    slopes = {target: scores for target, method, scores in of_tokens if method == "gradient"}
    for token in range(ids.shape[1]):
        moves = {target: list(_moves(subject, whole, target, token)) for target in {target for target, *_ in of_tokens}}
        for target, method, scores in of_tokens:
            score, least, most = (
                float(scores[token].abs()),
                min(moves[target], default=0),
                max(moves[target], default=1),
            )
            if most == 0 and score > subject.limit * float(scores.abs().max()):
                yield f"{method} at {target}: token {token} moves nothing and has {score:.0e}"
            has_slope = target in slopes and bool(slopes[target][token] > subject.limit)
            if least > 100 * subject.limit and has_slope and score == 0 and method in SHARES:
                yield f"{method} at {target}: token {token} moves the logits by {least:.0e} and has 0"


def batches(subject: Subject) -> Iterator[str]:
    """A sequence has the scores in a batch that it has by itself."""
    tensors = {name: x for name, x in subject.inputs.items() if isinstance(x, Tensor)}
    alone = subject.logits(subject.inputs)
    if alone is None or any(len(x) != 1 for x in tensors.values()):
        return
    generator = torch.Generator().manual_seed(3)
    both = {**subject.inputs, **{name: torch.cat([_other(name, x, generator), x]) for name, x in tensors.items()}}
    logits = subject.logits(both)
    if logits is None or len(logits) != 2 or not _same(logits[1], alone[0], subject.limit):
        return
    for method, result in _last(subject):
        other = subject.tried(both, method, -1)
        if isinstance(other, str):
            yield f"{method}: refused in a batch: {other[:120]}"
        elif not _same(other.scores[1], result.scores[0], 100 * subject.limit):
            yield f"{method}: other scores in a batch"


def prefixes(subject: Subject) -> Iterator[str]:
    """A causal model's scores of a token are those of the text up to it."""
    ids, whole = subject.ids, subject.logits(subject.inputs)
    if ids is None or whole is None or whole.ndim != 3 or not set(subject.inputs) <= {"input_ids", "use_cache"}:
        return
    last = ids.shape[1] - 3
    prefix = {**subject.inputs, "input_ids": ids[:, : last + 1]}
    logits = subject.logits(prefix)
    if logits is None or logits.ndim != 3 or not _same(logits[:, -1], whole[:, last], subject.limit):
        return
    for method, _ in _last(subject):
        short, long = subject.tried(prefix, method, -1), subject.tried(subject.inputs, method, last)
        if isinstance(short, str) or isinstance(long, str):
            yield f"{method}: refused on a prefix"
        elif not _same(long.scores[..., : last + 1], short.scores, 100 * subject.limit):
            yield f"{method}: other scores on a prefix"


def padding(subject: Subject) -> Iterator[str]:
    """A padded text has the scores of the text, and padding has none."""
    ids, whole = subject.ids, subject.logits(subject.inputs)
    takes_mask = "attention_mask" in inspect.signature(subject.model.forward).parameters
    if ids is None or whole is None or not takes_mask or not set(subject.inputs) <= {"input_ids", "use_cache"}:
        return
    filler = torch.full_like(ids[:, :2], WORDS[0])
    for side, order in {"right": 1, "left": -1}.items():
        padded, mask = (
            torch.cat([real, other][::order], 1)
            for real, other in ((ids, filler), (torch.ones_like(ids), torch.zeros_like(filler)))
        )
        inputs = {**subject.inputs, "input_ids": padded, "attention_mask": mask}
        real, logits = mask[0].bool(), subject.logits(inputs)
        if logits is not None and logits.ndim == 3 and logits.shape[1] == len(real):
            logits = logits[:, real]
        if logits is None or not _same(logits, whole, subject.limit):
            continue
        for method, result in _last(subject):
            other = subject.tried(inputs, method, -1)
            if isinstance(other, str):
                yield f"{method}: refused with padding on the {side}"
            elif other.scores.shape[-1] == len(real):
                same = _same(other.scores[..., real], result.scores, 100 * subject.limit)
                if not same or bool((other.scores[..., ~real] != 0).any()):
                    yield f"{method}: other scores with padding on the {side}"


def advice(subject: Subject) -> Iterator[str]:
    """A method that a refusal names is not refused."""
    for (target, method), text in subject.refusals.items():
        found = re.search(r"work here with their default options: ((?:'\w+'(?:, )?)+)", text)
        for name in re.findall(r"'(\w+)'", found[1]) if found else ():
            if (target, name) in subject.refusals:
                yield f"{method} at {target} names {name}: {subject.refusals[target, name][:120]}"


LAWS: Sequence[Callable[[Subject], Iterator[str]]] = (finite, influence, batches, prefixes, padding, advice)


def broken(subject: Subject) -> list[str]:
    """Run all methods and return a message for each law that does not hold."""
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    for target in [-1] if subject.ids is None else [-1, 2]:
        for method in METHODS:
            result = subject.tried(subject.inputs, method, target)
            if isinstance(result, str):
                subject.refusals[target, method] = result
            else:
                subject.results[target, method] = result
    messages = [f"{law.__name__}: {message}" for law in LAWS for message in law(subject)]
    after = subject.model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value.nan_to_num(), after[name].nan_to_num())]
    return messages + [f"state: {name} changed" for name in changed]


def measure(case: Case, built: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the outcome of a class of the sweep: its messages, in float64 where the host computes in it."""
    try:
        model, inputs, *_ = prepared(case)
    except Exception as error:
        return {"outcome": "unbuilt", "messages": [str(error)[:120]]}
    built()
    double = copy.deepcopy(model).double()
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    with promoted():
        subject = Subject(double, wide, EXACT, explained_by(double))
        is_exact = subject.logits(wide) is not None
        messages = [*_errors(subject), *broken(subject)] if is_exact else []
    if not is_exact:
        messages = broken(replace(subject, model=model, inputs=inputs, limit=ROUNDED, explained=explained_by(model)))
    return {"outcome": "broken" if messages else "holds", "messages": messages}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a law does not hold, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.laws", description="Laws of results on models of the sweep.")
    parser.add_argument("pattern", nargs="?", default="", help="regular expression that finds a class or its task")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    options = parser.parse_args(arguments)
    record = read_record(Path())
    if record is None:
        parser.error("there is no docs/sweep.json here: run it in a checkout, after tools.sweep")
    rows = [row for row in record["rows"] if row["outcome"] == "works"]
    chosen = [row for row in rows if re.search(options.pattern, f"{row['task']}: {row['class']}")]
    cases = [Case(row["task"], row["type"], row["class"]) for row in chosen]
    if not cases:
        parser.error(f"no class of the sweep that works, and no task, matches {options.pattern!r}")
    torch.set_num_threads(1)
    count = 0
    with warnings.catch_warnings(), quiet_hosts():
        warnings.simplefilter("ignore")
        outcomes = run(cases, options.jobs, measure, seconds=SECONDS)
        for case, result in tqdm(outcomes, total=len(cases), disable=None, leave=False, unit="model"):
            messages = result.get("messages") or [f"{result['outcome']}: {result.get('message', '')}"]
            for message in messages if result["outcome"] != "holds" else ():
                count += 1
                tqdm.write(f"{case.name}: {message}")
    print(f"{len(cases)} classes, {count} messages.")
    return int(count > 0)


def explained_by(model: nn.Module) -> Callable[[Mapping[str, Any], str, int], Attribution]:
    """Return `Subject.explained` of a model."""

    def explained(inputs: Mapping[str, Any], method: str, target: int) -> Attribution:
        return explain(model, inputs, method=method, target=target, progress=False, **METHODS[method])

    return explained


def _errors(subject: Subject) -> Iterator[str]:
    torch.manual_seed(0)
    try:
        layers = trace(subject.model, subject.inputs, progress=False).layers
        errors = {layer.name: layer.reconstruction_error() for layer in layers}
    except UnilinattnError as error:
        yield f"trace: refused in float64: {str(error)[:120]}"
        return
    yield from (f"trace: {name} misses its output by {e:.0e}" for name, e in errors.items() if not e <= subject.limit)


def _last(subject: Subject) -> list[tuple[str, Attribution]]:
    return [(method, result) for (target, method), result in subject.results.items() if target == -1]


def _moves(subject: Subject, whole: Tensor, target: int, token: int) -> Iterator[float]:
    """Yield how far other words in place of a token move the logits at the target."""
    assert subject.ids is not None
    row = (lambda logits: logits[:, target]) if whole.ndim == 3 else (lambda logits: logits)
    for word in WORDS:
        ids = subject.ids.clone()
        ids[0, token] = word if word != int(ids[0, token]) else word + 1
        logits = subject.logits({**subject.inputs, "input_ids": ids})
        if logits is not None and logits.shape == whole.shape:
            yield float((row(logits) - row(whole)).abs().max())


def _other(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return another input of the same kind: noise, or other ordinary words."""
    if x.is_floating_point():
        return x + 0.3 * x.std() * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    return torch.where((x >= 5) & (x < 90), (x + 7) % 85 + 5, x) if name.endswith("input_ids") else x


def _same(first: Tensor, second: Tensor, limit: float) -> bool:
    if first.shape != second.shape:
        return False
    return float((first - second).abs().max()) <= limit * max(1e-30, float(second.abs().max()))


if __name__ == "__main__":
    sys.exit(main())
