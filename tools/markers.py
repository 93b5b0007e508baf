"""Generated sections of a page, the text between `<!-- name:begin -->` and `<!-- name:end -->`, and tables in them."""

from collections.abc import Iterable, Sequence


class MissingSectionError(LookupError):
    """A page lacks the markers of a section."""


def markers(name: str) -> tuple[str, str]:
    """The comments that open and close section `name`."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def read_section(page: str, name: str) -> str:
    """Return the body of section `name`, without surrounding blank lines.

    Raises `MissingSectionError` if `page` lacks its markers.
    """
    return _split(page, name)[1].strip()


def replace_section(page: str, name: str, body: str) -> str:
    """Return `page` with `body` as section `name`, between blank lines.

    Raises `MissingSectionError` if `page` lacks its markers.
    """
    before, _, after = _split(page, name)
    begin, end = markers(name)
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def table(heads: Sequence[str], rows: Iterable[Iterable[object]], *, right: int | None = None) -> str:
    """Return a Markdown table, whose columns from number `right` on are aligned to the right."""
    rules = ["---" if right is None or column < right else "---:" for column in range(len(heads))]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in (heads, rules, *rows)
    )


def _split(page: str, name: str) -> tuple[str, str, str]:
    begin, end = markers(name)
    before, opened, rest = page.partition(begin)
    body, closed, after = rest.partition(end)
    if not (opened and closed):
        raise MissingSectionError(f"put {begin} and {end} around its section {name!r}")
    return before, body, after
