"""The command `unilinattn list`: the registered architectures and methods, and the options of a method.

The entries of this package are read from `registered.json`, which `python -m tools.surface` writes, because the
registry itself imports torch. It is imported only if another installed package registers entries.
"""

import argparse
import json
import textwrap
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from unilinattn.errors import OptionError
from unilinattn.optional import ENTRY_POINT_GROUPS

FILE = "registered.json"
WIDTH = 118
CLOSE = 5
"""Number of close names that the error for an unknown name shows."""

Entry = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    """Print all entries of the registry, or those of one name with the options of a method.

    Raises `OptionError` for an unknown name.
    """
    listed = entries()
    if options.name is None:
        print(_overview(listed))
        return
    shown = [
        *("\n".join(_method(method)) for method in listed["methods"] if method["name"] == options.name),
        *("\n".join(_architecture(each)) for each in listed["architectures"] if each["name"] == options.name),
    ]
    if not shown:
        names = [entry["name"] for group in listed.values() for entry in group]
        close = get_close_matches(options.name, names, n=CLOSE)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        raise OptionError(f"no method or architecture is named {options.name!r}{hint} `unilinattn list` prints all.")
    print("\n\n".join(shown))


def entries() -> dict[str, list[Entry]]:
    """Return the registered architectures and methods as plain values, also those of other installed packages."""
    stored: dict[str, list[Entry]] = json.loads(files("unilinattn.cli").joinpath(FILE).read_text(encoding="utf-8"))
    if not any(entry_points(group=group) for group in ENTRY_POINT_GROUPS):
        return stored
    questions = {method["name"]: method for method in stored["methods"]}
    return {
        kind: [{**questions.get(entry["name"], {}), **entry} if kind == "methods" else entry for entry in found]
        for kind, found in from_registry().items()
    }


def from_registry() -> dict[str, list[Entry]]:
    """Return the entries of the registry as plain values."""
    from unilinattn.methods.described import option_texts
    from unilinattn.registry import list_architectures, list_methods

    return {
        "architectures": [
            {"name": each.name, "kind": each.kind, "summary": each.summary, "hosts": list(each.hosts)}
            for each in list_architectures().values()
        ],
        "methods": [
            {
                "name": each.name,
                "summary": each.summary,
                "options": [text._asdict() for text in option_texts(each)],
            }
            for each in list_methods().values()
        ],
    }


def _overview(listed: dict[str, list[Entry]]) -> str:
    lines = ["Architectures"]
    for architecture in listed["architectures"]:
        lines += [f"  {line}" for line in _architecture(architecture)]
    lines += ["", "Methods (`unilinattn list NAME` prints the options of one)"]
    width = max((len(method["name"]) for method in listed["methods"]), default=0)
    lines += [f"  {method['name'].ljust(width)}  {method['summary']}" for method in listed["methods"]]
    return "\n".join(lines)


def _architecture(architecture: Entry) -> Iterator[str]:
    yield f"{architecture['name']}: {architecture['kind']}"
    yield f"    {architecture['summary']}"
    for host in architecture["hosts"] or ("any, known by what it calls",):
        yield f"    host  {host}"


def _method(method: Entry) -> Iterator[str]:
    yield f"{method['name']}: {method['summary']}"
    if "question" in method:
        yield f"    question  {method['question']}"
        yield f"    page      {method['page']}"
    yield "Options" if method["options"] else "No options"
    for option in method["options"]:
        yield f"  {option['name']} = {option['default']}"
        yield from _wrapped((f"accepts {option['accepted']}", option["meaning"]))


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        indent = " " * 6
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
