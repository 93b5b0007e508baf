"""`python -m tools.surface [--check]`: write the files that repeat the registry for those who must not import torch.

`unilinattn/cli/registered.json` is what `unilinattn list` prints, and `unilinattn/methods/typed.pyi` the signatures of
`explain` and `estimate` for each method, which editors and type checkers read.
"""

import argparse
import ast
import collections.abc
import inspect
import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tools.coverage_pages import METHODS, package_architectures, package_methods
from tools.families import GROUPS
from unilinattn.cli import listing
from unilinattn.methods import run
from unilinattn.registry import Method

ROOT = Path(__file__).resolve().parents[1]
REGISTERED = Path("unilinattn/cli") / listing.FILE
TYPED = Path("unilinattn/methods/typed.pyi")


def registered() -> str:
    """Return the content of `registered.json`: the package's own entries, each method with its question and page."""
    questions = {name: group.question for group in GROUPS for name in group.methods}
    every = listing.from_registry()
    own = {
        "architectures": [entry for entry in every["architectures"] if entry["name"] in package_architectures()],
        "methods": [
            {**entry, "question": questions[entry["name"]], "page": f"{METHODS / entry['name']}.md"}
            for entry in every["methods"]
            if entry["name"] in package_methods()
        ],
    }
    return json.dumps(own, indent=1) + "\n"


HEAD = """\
# Written by `python -m tools.surface` from the options of the registered methods.

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

from torch import nn

from unilinattn.methods.run import Tokens
from unilinattn.methods.targets import NamedTarget
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Trace
from unilinattn.tracing.trust import Trust
"""

NAMED = {"logit": ("str", "tuple[int | str, int | str]")}
"""Values of an option that `explain` and `estimate` turn into those of the method."""


def typed() -> str:
    """Return the content of `typed.pyi`: the options of each method, and the signatures that take them."""
    methods = package_methods()
    parts = [HEAD]
    for method in methods.values():
        given = {} if method.options is None else method.options.model_fields
        lines = [f"    {name}: {source(info.annotation, NAMED.get(name, ()))}" for name, info in given.items()]
        parts.append("\n".join([f"class {_keywords(method)}(TypedDict, total=False):", *(lines or ["    ..."])]))
    default = ", ".join(_keywords(methods[name]) for name in ("logit", run.COMPOSED))
    parts.append(f"class DefaultKeywords({default}, total=False): ...")
    parts += [_by_method("Explains", run.explain, methods), _by_method("Estimates", run.estimate, methods)]
    mappings = {name: f"{_keywords(method)} = ..." for name, method in methods.items()}
    parts.append(f"class Compares(Protocol):\n{_call(run.compare, mappings, 'Any')}")
    return "\n\n".join(parts) + "\n"


def _by_method(name: str, function: Callable[..., Any], methods: Mapping[str, Method]) -> str:
    """Return a protocol with an overload for each method, for no method, and for a name that is no literal."""
    overloads = [_call(function, {"method": "None = None"}, "Unpack[DefaultKeywords]")]
    for method in methods.values():
        overloads.append(_call(function, {"method": f"Literal[{method.name!r}]"}, f"Unpack[{_keywords(method)}]"))
    # Without options: a wrong option of a method would match. `**mapping` passes any options.
    overloads.append(_call(function, {"method": "str"}, None))
    return f"class {name}(Protocol):\n" + "\n".join(f"    @overload\n{one}" for one in overloads)


def _call(function: Callable[..., Any], keywords: Mapping[str, str], options: str | None) -> str:
    """Return the line of `__call__` with the arguments of a function, some `keywords` and the type of its options."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    given = tree.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + ["..." for _ in given.defaults]
    places = [_argument(argument, default) for argument, default in zip(given.args, defaults, strict=True)]
    named = [
        _argument(argument, None if default is None else "...")
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if argument.arg not in keywords
    ]
    named += [f"{name}: {text}" for name, text in keywords.items()]
    arguments = ", ".join(["self", *places, "*", *named, *([] if options is None else [f"**options: {options}"])])
    assert tree.returns is not None
    return f"    def __call__({arguments}) -> {ast.unparse(tree.returns)}: ..."


def _argument(argument: ast.arg, default: str | None) -> str:
    assert argument.annotation is not None
    text = f"{argument.arg}: {ast.unparse(argument.annotation)}"
    return text if default is None else f"{text} = {default}"


def _keywords(method: Method) -> str:
    return "".join(map(str.capitalize, method.name.split("_"))) + "Keywords"


def formatted(text: str) -> str:
    """Return the source of a stub file as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(ROOT / TYPED), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def source(annotation: Any, also: Sequence[str] = ()) -> str:
    """Return the source text of an option's type, without its limits; a union also has the members `also`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        text = source(parts[0])
    elif origin is Literal:
        text = f"Literal[{', '.join(map(repr, parts))}]"
    elif origin in (Union, types.UnionType):
        nothing = [part for part in parts if part is type(None)]
        members = [source(part) for part in parts if part is not type(None)]
        text = " | ".join([*members, *also, *map(source, nothing)])
    elif annotation is type(None):
        text = "None"
    elif origin is collections.abc.Callable:
        text = "Callable[[Any], Any]"
    elif origin is not None:
        text = f"{origin.__name__}[{', '.join(map(source, parts))}]"
    else:
        text = str(annotation.__name__)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` return 1 if one is stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.surface", description="Write the files about the registry.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is stale")
    check = parser.parse_args(arguments).check
    texts = {REGISTERED: registered(), TYPED: formatted(typed())}
    stale = [path for path, text in texts.items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text]
    for path in stale:
        print(f"{path} is stale: run `python -m tools.surface`." if check else f"{path} is written.")
        if not check:
            (ROOT / path).write_text(texts[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
