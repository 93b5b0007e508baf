"""The folder of a report, which is replaced as a whole."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unilinattn.errors import ResultFileError

FORMAT = "unilinattn.report"
"""The format of the numbers' file, by which an earlier report is recognised."""

PAGE, PICTURE, NUMBERS = "index.html", "compare.png", "compare.json"
"""The files of a report; its folder holds no others."""


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, which replaces `out` on success and is removed on failure.

    Raises `ResultFileError`, on entry, unless `out` is free, an empty folder or an earlier report, or if its parent
    folder is not writable.
    """
    out = Path(os.path.abspath(out))
    check_replaceable(out)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ResultFileError(f"Cannot write a report to {out}: {error.strerror}. Name another folder.") from error
    try:
        yield temporary
        check_replaceable(out)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise `ResultFileError` unless `out` is free, an empty folder, or a folder with only a report."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ResultFileError(f"{out} is no folder, so no report can be written there; name another with --out.")
    names = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    strange = [name for name in names if name not in (PAGE, PICTURE, NUMBERS)]
    if not names or (not strange and _is_ours(out / NUMBERS)):
        return
    reason = f"it holds {', '.join(map(repr, strange[:3]))}" if strange else f"its {NUMBERS} is not one of ours"
    raise ResultFileError(
        f"{out} is not empty and not just a report of this program ({reason}), so it is not changed; "
        "name another folder with --out, or empty it."
    )


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False
