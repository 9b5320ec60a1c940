"""Tables: the same rows as plain text for a terminal and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; those whose cells start with a digit are set flush right."""
    table = [list(headings), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    right = [bool(rows) and all(row[i][:1].isdigit() for row in rows) for i in range(len(headings))]
    lines = (
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    )
    return "\n".join(lines)


def compact(count: int) -> str:
    """A count in three digits and a decimal prefix: 2.72 T, 524 k."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.{max(0, 2 - len(str(int(count / size))) + 1)}f} {prefix}"
    return f"{count} "


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as an HTML table; every cell is escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
