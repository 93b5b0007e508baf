"""The command line: `unilinattn compare`, `evaluate`, `explain`, `decomposition` and `list`.

The module of a command is imported with torch, which takes seconds, after the arguments are parsed. `--help` and `list`
need no torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from unilinattn import __version__
from unilinattn.cli.arguments import METHODS, parser
from unilinattn.errors import UnilinattnError
from unilinattn.startup import INTERRUPTED, interrupts_raise

_MODULES = {
    "compare": "unilinattn.cli.compare",
    "evaluate": "unilinattn.cli.evaluate",
    "explain": "unilinattn.cli.explain",
    "decomposition": "unilinattn.cli.decomposition",
    "list": "unilinattn.cli.listing",
}
"""The module of each command, whose function `run` takes the parsed arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for an error reported on stderr, 130 if interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands, evaluate = parser(__version__)
    if words[:1] == ["evaluate"]:
        # Its help lists the metrics, whose module needs torch.
        import_module(_MODULES["evaluate"]).add_arguments(evaluate, METHODS)
    options = commands.parse_args(words)
    try:
        module = import_module(_MODULES[options.command])
        # Until here Ctrl-C ends the process by itself, because an import may swallow a KeyboardInterrupt.
        interrupts_raise()
        module.run(options)
    except UnilinattnError as error:
        print(f"unilinattn {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"unilinattn {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
