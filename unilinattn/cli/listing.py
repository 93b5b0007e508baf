"""The command `unilinattn list`: the registered architectures and methods, and the options of a method.

Methods are listed from their classes, and the adapters of this package from the source of their registration, because
the modules of adapters import torch. The registry itself is imported only if another installed package registers
entries.
"""

import argparse
import ast
import textwrap
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.resources import files
from typing import NamedTuple

from pydantic import BaseModel

from unilinattn.aligned import aligned
from unilinattn.errors import OptionError
from unilinattn.optional import ENTRY_POINT_GROUPS
from unilinattn.options import METHODS
from unilinattn.options.described import option_texts

WIDTH = 118
CLOSE = 5
"""Number of close names that the error for an unknown name shows."""


class Adapter(NamedTuple):
    """An architecture in the list, with the names of `registry.Architecture`."""

    name: str
    kind: str
    summary: str
    hosts: tuple[str, ...]


class Listed(NamedTuple):
    """A method in the list, with the names of `registry.Method`."""

    name: str
    summary: str
    options: type[BaseModel] | None


def run(options: argparse.Namespace) -> None:
    """Print all entries of the registry, or those of one name with the options of a method.

    Raises `OptionError` for an unknown name.
    """
    architectures, methods = entries()
    if options.name is None:
        print(_overview(architectures, methods))
        return
    shown = [
        *("\n".join(_method(method)) for method in methods if method.name == options.name),
        *("\n".join(_architecture(each)) for each in architectures if each.name == options.name),
    ]
    if not shown:
        names = [each.name for each in architectures] + [each.name for each in methods]
        close = get_close_matches(options.name, names, n=CLOSE)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        raise OptionError(f"no method or architecture is named {options.name!r}{hint} `unilinattn list` prints all.")
    print("\n\n".join(shown))


def entries() -> tuple[list[Adapter], list[Listed]]:
    """Return the registered architectures and methods by name, also those of other installed packages."""
    if any(entry_points(group=group) for group in ENTRY_POINT_GROUPS):
        return _from_registry()
    methods = [Listed(method.name, method.summary(), method) for method in METHODS]
    return sorted(own_adapters()), sorted(methods, key=lambda method: method.name)


def _from_registry() -> tuple[list[Adapter], list[Listed]]:
    from unilinattn.registry import list_architectures, list_methods

    return (
        [Adapter(each.name, each.kind, each.summary, each.hosts) for each in list_architectures().values()],
        [Listed(each.name, each.summary, each.options) for each in list_methods().values()],
    )


def own_adapters() -> Iterator[Adapter]:
    """Yield the adapters of this package; names, kinds and hosts are literals in the calls that register them."""
    sources = (file for file in files("unilinattn").joinpath("architectures").iterdir() if file.name.endswith(".py"))
    body = [node for file in sources for node in ast.parse(file.read_text(encoding="utf-8")).body]
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            registered = [(call, node) for call in node.decorator_list]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # A class without code: `register_architecture(...)(recorded)`.
            builders = (functions.get(ast.unparse(argument)) for argument in node.value.args)
            registered = [(node.value.func, builder) for builder in builders if builder is not None]
        else:
            continue
        for call, builder in registered:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_architecture":
                named = {keyword.arg: keyword.value for keyword in call.keywords}
                name, kind = (ast.literal_eval(named[argument]) for argument in ("name", "kind"))
                summary = (ast.get_docstring(builder) or "").split("\n", 1)[0]
                yield Adapter(name, kind, summary, tuple(map(ast.literal_eval, call.args)))


def _overview(architectures: Iterable[Adapter], methods: Iterable[Listed]) -> str:
    lines = ["Architectures"]
    for architecture in architectures:
        lines += [f"  {line}" for line in _architecture(architecture)]
    lines += ["", "Methods (`unilinattn list NAME` prints the options of one)"]
    return "\n".join([*lines, aligned([(method.name, method.summary) for method in methods], indent=2)])


def _architecture(architecture: Adapter) -> Iterator[str]:
    yield f"{architecture.name}: {architecture.kind}"
    yield f"    {architecture.summary}"
    for host in architecture.hosts or ("any, known by what it calls",):
        yield f"    host  {host}"


def _method(method: Listed) -> Iterator[str]:
    yield f"{method.name}: {method.summary}"
    if method.options in METHODS:
        yield f"    question  {method.options.question}"
        yield f"    page      docs/methods/{method.name}.md"
    texts = option_texts(method.options)
    yield "Options" if texts else "No options"
    for text in texts:
        yield f"  {text.name} = {text.default}"
        yield from _wrapped((f"accepts {text.accepted}", text.meaning))


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        indent = " " * 6
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
