"""Packages of the optional extras and of plug-ins, imported only when a feature needs them."""

import importlib
from types import ModuleType

from unilinattn.errors import UnilinattnError

ENTRY_POINT_GROUPS = ("unilinattn.architectures", "unilinattn.methods")
"""Groups of entry points. Each names a module that registers on import; one that fails is skipped with a warning."""


class MissingExtraError(UnilinattnError, ImportError):
    """A feature needs a package of an optional extra; the message names the extra."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import `module` of an optional package, which `extra` installs.

    Raises `MissingExtraError` if the package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"This needs {package}, which is not installed: pip install 'unilinattn[{extra}]'"
        ) from error
