"""Docstrings as Markdown: lines like "recipe: what to make of it" become the items of a list, and the
fields of a class that have no docstring of their own are listed at its end.

A Griffe extension; mkdocs.yml names it.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Object

_ITEM = re.compile(r"^((?:`?[a-z]\w*`?(?:, )?)+): ")


def as_markdown(text: str) -> str:
    """Each parameter in an item of its own, and a paragraph for what follows the list."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        is_item = _ITEM.match(line) is not None
        goes_on = in_list and line.startswith("    ")
        if is_item != in_list and not goes_on:
            lines.append("")
        in_list = is_item or goes_on
        lines.append(_ITEM.sub(r"- **\1**: ", line) if is_item else line)
    return "\n".join(lines)


def _field(member: Object) -> str | None:
    """One line for a public field with a type and without a docstring."""
    is_field = isinstance(member, Attribute) and member.is_public and not member.docstring
    if not is_field or "property" in member.labels or not member.annotation:
        return None
    if "ClassVar" in str(member.annotation):
        return None
    return f"    {member.name}: {member.annotation}" + f" = {member.value}" * (member.value is not None)


class Readable(Extension):
    """Rewrites every docstring that Griffe loads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        if fields := [line for member in cls.members.values() if (line := _field(member))]:
            cls.docstring = cls.docstring or Docstring("", parent=cls)
            cls.docstring.value += "\n".join(["\n\nFields:\n", *fields])
