"""An extension of griffe that replaces roles in docstrings, such as :class:`~a.b.C`, by links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|obj):`(?:(?P<title>[^`<]+?) <)?(?P<short>~?)(?P<name>[\w.]+)>?`")


class Roles(griffe.Extension):
    """An extension that rewrites each docstring after griffe has read its object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles. A name without a page is shown without a link."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda role: _link(role, obj), obj.docstring.value)


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    name = role["name"].removeprefix(".")
    shown = role["title"] or (name.rsplit(".", 1)[-1] if role["short"] else name)
    return f'<autoref optional identifier="{_place(name, obj)}"><code>{shown}</code></autoref>'


def _place(name: str, obj: griffe.Object) -> str:
    """Return the full name; a short name is a member of the object's class or module."""
    if name.startswith("lightning_freescale."):
        return name
    scope = obj if obj.is_class else obj.parent
    inside = scope is not None and scope.is_class and name in scope.members
    return f"{scope.path if inside else obj.module.path}.{name}"
