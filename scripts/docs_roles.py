"""Extension of griffe: roles in docstrings, as :class:`~a.b.C`, become links where the name has a place on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|obj):`(?:(?P<title>[^`<]+?) <)?(?P<short>~?)(?P<name>[\w.]+)>?`")


class Roles(griffe.Extension):
    """Rewrites every docstring when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """A link that leads nowhere is shown as the name alone."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda role: _link(role, obj), obj.docstring.value)


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    name = role["name"].removeprefix(".")
    shown = role["title"] or (name.rsplit(".", 1)[-1] if role["short"] else name)
    return f'<autoref optional identifier="{_place(name, obj)}"><code>{shown}</code></autoref>'


def _place(name: str, obj: griffe.Object) -> str:
    """Of a name without the package's: in the object's class, or in its module."""
    if name.startswith("lightning_freescale."):
        return name
    scope = obj if obj.is_class else obj.parent
    inside = scope is not None and scope.is_class and name in scope.members
    return f"{scope.path if inside else obj.module.path}.{name}"
