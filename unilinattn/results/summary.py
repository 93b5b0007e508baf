"""The facts of a result in plain text: its explained value, its largest scores, its sums and its errors."""

from unilinattn.aligned import aligned
from unilinattn.results.explained import Quote, explained_clause, number_name, only_number, quoted
from unilinattn.results.panels import one_sequence
from unilinattn.results.ranking import Ranked, Ranking, SequenceLabels, ranking
from unilinattn.results.scores import Scores, axes_text, count_kinds, largest_error

CANCELS = 10
"""Ratio of the sizes to the size of their sum from which words name the cancellation."""

SINKS = "attention sinks, not ranked"

MOST_SINKS = 4
"""Largest number of attention sinks that a line names."""


def described(result: Scores) -> str:
    """Return the text of a result: its facts, its errors, its axes and its options, of several sequences the first."""
    scope = f", scope {result.scope}" if result.scope else ""
    lines = [f"{type(result).__name__}: {result.method}{f' of {result.model}' if result.model else ''}{scope}"]
    lines += [f"  {line}" for line in fact_lines(result)]
    if errors := _errors(result):
        lines.append(f"  {errors}")
    lines += [f"  WARNING: {_short(warning)}" for warning in result.warnings]
    if result.left_out:
        lines.append(f"  LEFT OUT, no adapter knows them: {', '.join(result.left_out)}")
    layers = f"; {len(result.layers)} layers ({count_kinds(result.kinds) or 'kinds not recorded'})"
    dtype = str(result.scores.dtype).removeprefix("torch.")
    lines.append(f"  scores: {axes_text(result)} ({dtype}){layers if result.layers else ''}")
    if "log2_scale" in result.extras:
        exponent = float(result.extras["log2_scale"].max())
        lines.append(f"  scale: rows are to be multiplied by 2**log2_scale (extras), at most 2**{exponent:.0f}")
    if result.options:
        lines.append("  options: " + ", ".join(f"{name}={value!r}" for name, value in result.options.items()))
    return "\n".join(lines)


def fact_lines(result: Scores, batch: int = 0) -> list[str]:
    """Return a sequence's explained value, largest scores, sinks, sums, cancellation and check, a line for each."""
    clause = explained_clause(result, batch)
    if (sequences := result.sizes.get("batch", 1)) > 1:
        clause = f"sequence {batch} of {sequences}{f': {clause}' if clause else ''}"
    ranks = ranking(result, batch)
    sinks = sink_names(ranks)
    lines = [clause, *_table(ranks).split("\n"), f"{SINKS}: {sinks}" if sinks else ""]
    lines.append(", ".join(f"{name} {value}" for name, value in sums(result, batch).items()))
    lines.append(cancellation(result, batch))
    lines.append(checked(result, batch))
    return [line for line in lines if line]


def checked(result: Scores, batch: int = 0) -> str:
    """Return the sentence of the check of a sequence, empty without one."""
    return result.checks[batch].sentence if result.checks else ""


def sums(result: Scores, batch: int = 0) -> dict[str, str]:
    """Return the bias and the cancellation of the shares of a logit, where they are one number, and the gap.

    Log-odds have a remainder too, the part that is not linear in the logits.
    """
    single, entries = one_sequence(result, batch), {}
    rest = ("remainder",) if number_name(result) == "log-odds" else ()
    if "logit" in single.extras:
        for name in ("bias", *rest, "cancellation"):
            if (number := only_number(single, name)) is not None:
                entries[name] = f"{number:.3g}"
    if result.completeness_gap is not None:
        entries["completeness gap"] = f"{result.completeness_gap:.1e}"
    return entries


def cancellation(result: Scores, batch: int = 0, quote: Quote = quoted) -> str:
    """Return a clause on the row of a sequence whose shares or vectors cancel most, empty up to a ratio of `CANCELS`.

    Shares of a logit are numbers, which it names; `latim` and `alti` record the ratio of norms of vectors.
    """
    labels = SequenceLabels.of(result, batch, quote)
    single = labels.single
    ratio = single.extras.get("cancellation")
    if ratio is None or ratio.ndim != single.scores.ndim - 1 or not ratio.numel():
        return ""
    ratios = ratio.double().cpu().nan_to_num(0.0)
    index = tuple(int(position) for position in (ratios == ratios.max()).nonzero()[0])
    if not float(ratio[index]) > CANCELS:
        return ""
    where = f" at {place}" if (place := labels.row(index)) else ""
    if "logit" not in single.extras:
        return f"vectors cancel{where}: the sum of their norms is {float(ratio[index]):.3g} times the norm of their sum"
    terms = [(share, "") for share in single.scores[index].flatten().tolist()]
    terms.append((float(single.extras["bias"][index]), " (bias)"))
    *first, last = (f"{share:.3g}{note}" for share, note in sorted(terms, key=lambda term: -abs(term[0]))[:3])
    logit = single.extras["logit"]
    value = float(logit[index] if logit.ndim == len(index) else logit)
    number = {"logit": "a logit", "output": "an output"}.get(number_name(result), "log-odds")
    return f"shares cancel{where}: {', '.join(first)} and {last} make {number} of {value:.3g}"


def sink_names(ranks: Ranking) -> str:
    """Return the attention sinks with their scores, empty without any."""
    more = f" and {len(ranks.sinks) - MOST_SINKS} more" if len(ranks.sinks) > MOST_SINKS else ""
    names = ", ".join(_with_numbers(sink, ranks) for sink in ranks.sinks[:MOST_SINKS])
    return f"{names}{more}"


def nothing_ranked(ranks: Ranking) -> str:
    """Return a clause for a ranking without entries."""
    return "no scores but zero" + (" and those of attention sinks" if ranks.sinks else "")


def _with_numbers(entry: Ranked, ranks: Ranking) -> str:
    first, *parts = (f"{number:.3g}" for number in entry.numbers)
    notes = ", ".join(f"{name} {number}" for name, number in zip(ranks.columns[1:], parts, strict=True))
    return f"{entry.name} {first}{f' ({notes})' if notes else ''}"


def _table(ranks: Ranking) -> str:
    """Return the largest scores: keys side by side, and pairs one under the other."""
    if not ranks.top:
        return nothing_ranked(ranks)
    rows = [(entry.name, *(f"{number:.3g}" for number in entry.numbers)) for entry in ranks.top]
    heads = ("largest", *ranks.columns)
    if ranks.pairs:
        lines = rows if len(ranks.columns) == 1 else [heads, *rows]
        return aligned(lines, right=range(1, len(heads)))
    return aligned(list(zip(heads, *rows, strict=True)), right=range(1, len(rows) + 1))


def _errors(result: Scores) -> str:
    texts = []
    for name, errors in (("reconstruction", result.reconstruction_error), ("stream", result.stream_error)):
        if (worst := largest_error(errors)) is not None:
            texts.append(f"{name} error: {worst[1]:.1e} at worst ({worst[0]})")
    return "; ".join(texts)


def _short(warning: str) -> str:
    """Return a warning, of one that names attention sinks its first clause."""
    return warning.partition(". The residual stream")[0] if warning.startswith("attention sink") else warning
