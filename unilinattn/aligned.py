"""`aligned`: rows of cells as text whose columns line up."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: int = 0) -> str:
    """Return a line for each row, with every column as wide as its longest cell and two spaces between columns.

    The columns of the indices `right` end at the right, the others begin at the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join((" " * indent + line).rstrip() for line in lines)
