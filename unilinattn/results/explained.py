"""The explained value of a result in words: its logit, its position and its number."""

from collections.abc import Callable, Mapping

from unilinattn.options.bases import VECTOR_OF_TOKEN
from unilinattn.results.panels import one_sequence, target_key, target_query
from unilinattn.results.scores import Scores
from unilinattn.viz.colours import isolated, shown

Quote = Callable[[str], str]
"""Turns a token's text into words of a sentence."""

UNITS = {
    "token": "the logits of tokens",
    "class": "the logits of classes",
    "label": "the logits of labels",
    "output": "outputs",
}
"""Two of the numbers that a model returns, by the kind of its logits."""

LONGEST = 24
"""Characters of a token's text in lines of plain text; longer texts are cut."""


def quoted(text: str, length: int = LONGEST) -> str:
    """Return a token's text as a Python string, cut after `length` characters."""
    return repr(text) if len(text) <= length else f"{text[:length]!r}..."


def marked(text: str) -> str:
    """Return a token's text in the quotes of a page, apart from the direction of the text around it."""
    return f"“{isolated(shown(text))}”"


def explained_by_model(results: Mapping[str, Mapping[str, Scores]], batch: int = 0) -> list[str]:
    """Return the sentences on the explained values of models: one for all, or one for each model.

    A model's sentence is that of its methods that explain a logit, if there are any.
    """
    sentences = {}
    for model, methods in results.items():
        named = [result for result in methods.values() if "logit" in result.options] or list(methods.values())
        sentences[model] = " ".join(dict.fromkeys(filter(None, (explained(result, batch) for result in named))))
    if len(set(sentences.values())) == 1:
        return list(filter(None, sentences.values()))[:1]
    return [f"{model}: {sentence}" for model, sentence in sentences.items() if sentence]


def explained(result: Scores, batch: int = 0) -> str:
    """Return a sentence on the explained value of a sequence for a page, empty if it is not recorded."""
    return sentence(explained_clause(result, batch, marked))


def sentence(clause: str) -> str:
    """Return a clause as a sentence; an empty one stays empty."""
    return f"{clause[0].upper()}{clause[1:]}." if clause else ""


def explained_clause(result: Scores, batch: int = 0, quote: Quote = quoted) -> str:
    """Return the explained value of a sequence: the target, its token and the logit, where recorded.

    A centred logit is one less the mean of all logits, and log-odds are log p - log(1 - p). `quote` turns the text of a
    token into that of the clause.
    """
    single = one_sequence(result, batch)
    where = _where(result, single, batch, quote)
    if "logit" not in result.options:
        return f"scores of the keys {where}" if where else ""
    choice = result.options["logit"]
    names = [""] * 2 if single.logit_names is None else [f" {quote(name)}" for name in single.logit_names[0]]
    unit = result.logit_kind or ("token" if result.grid is None else "class")
    if result.pooled and target_key(result, batch, _count(single)) not in (result.cls or ()):
        where = ""
    kind = number_name(result)
    subject = f"the {kind} of the model's prediction{names[0]}"
    if unit == "label":
        subject = f"the {kind} of the most probable label{names[0]}"
    elif unit == "output":
        subject = f"the output{names[0]}"
    if isinstance(choice, int) and unit == "output":
        subject = f"output {choice}{names[0]}"
    elif isinstance(choice, int):
        subject = f"the {kind} of {unit} {choice}{names[0]}"
    elif _is_generated(result):
        subject = f"the {kind} of the generated token"
    elif isinstance(choice, list):
        first, second = (f"{index}{name}" for index, name in zip(choice, names, strict=True))
        subject = f"the difference of {UNITS[unit]} {first} and {second}"
    elif choice is not None and " " in choice:
        # A scalar of the output (see `host.scalars`); names of functions have no space.
        subject, where = choice, where if choice.startswith(VECTOR_OF_TOKEN) else ""
    elif choice is not None:
        subject = f"the function {choice}"
    if result.options.get("measure") == "centered" and _is_one_logit(result):
        subject += ", centred,"
    equal = "" if (number := only_number(single, "logit")) is None else f" = {number:.4g}"
    return f"explains {subject} {where}".rstrip(" ,") + equal


def number_name(result: Scores) -> str:
    """Return "log-odds" or "logit", by the option `measure`, or "output", the number of a regression.

    A pair and a function of the output have no log-odds.
    """
    if result.logit_kind == "output":
        return "output"
    return "log-odds" if result.options.get("measure") == "log-odds" and _is_one_logit(result) else "logit"


def _is_one_logit(result: Scores) -> bool:
    choice = result.options.get("logit")
    return choice is None or isinstance(choice, int) or _is_generated(result)


def _is_generated(result: Scores) -> bool:
    """Whether each row explains a generated token, whose id and target the options list."""
    is_listed = isinstance(result.options.get("logit"), list) and result.options.get("target") is not None
    return is_listed and "query" in result.dims


def only_number(single: Scores, name: str) -> float | None:
    """Return the number that an extra of one sequence has in every layer and row, None if it has several or none."""
    extra = single.extras.get(name)
    numbers = {f"{number:.4g}": number for number in extra.flatten().tolist()} if extra is not None else {}
    return next(iter(numbers.values())) if len(numbers) == 1 else None


def _count(single: Scores) -> int:
    return single.sizes["key"] if single.mask is None else int(single.mask[0].sum())


def _where(result: Scores, single: Scores, batch: int, quote: Quote) -> str:
    """Return the position of the target and its token."""
    if "query" in result.dims:
        return "for each query"
    position = target_key(result, batch, _count(single))
    if position is None:
        query = target_query(result, batch)
        return "" if query is None else f"at position {query[1]} of {query[0]!r}"
    tokens = None if single.tokens is None else single.tokens[0]
    if single.mask is not None and tokens is not None:
        tokens = [text for text, real in zip(tokens, single.mask[0].tolist(), strict=True) if real]
    where = f"at position {position}" + ("" if tokens is None else f" {quote(tokens[position])}")
    return where + (", the class token" if result.cls and position in result.cls else "")
