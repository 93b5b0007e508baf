"""Triton's interpreter in less time: the functions of its language are put in place once a launch."""

import sys
from collections.abc import Callable
from typing import Any

MODULE = "triton.runtime.interpreter"


def quicken() -> None:
    """Skip work that the interpreter, if it is imported, repeats at every call of a function in a kernel.

    It looks through the whole language for functions to put in place, which a launch has done, and makes the table of
    numpy's dtypes again.
    """
    interpreter = sys.modules.get(MODULE)
    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype")
    if interpreter is None or not all(hasattr(interpreter, name) for name in names):
        return
    language = interpreter.tl
    put_in_place, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype

    def once(function: Callable[..., Any]) -> Any:
        originals = (language.load, language.core.load, language.tensor.__add__)
        if any(map(language.core.is_builtin, originals)):
            return put_in_place(function)
        return interpreter._LangPatchScope()

    dtypes: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        # Types of blocks have no hash.
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = once, remembered
