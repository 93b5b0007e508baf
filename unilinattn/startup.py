"""Ctrl-C while the command line is being imported: one line and exit code 130, as while a command runs."""

import os
import signal
import sys
from pathlib import PurePath
from typing import Any, NoReturn

COMMAND = "unilinattn"

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def interrupts_raise() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again, which the running command handles."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _starts_command() -> bool:
    # `python -m` imports the package to locate the module; until then sys.argv[0] is "-m".
    as_module = sys.argv[:1] == ["-m"] and COMMAND in sys.orig_argv
    return as_module or PurePath(*sys.argv[:1]).stem == COMMAND


def _exit(signal_number: int, frame: Any) -> NoReturn:
    # The import of a compiled module may turn a KeyboardInterrupt into another error or swallow it.
    os.write(2, f"{COMMAND}: interrupted\n".encode())
    os._exit(INTERRUPTED)


if _starts_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
