"""Results of the first hour so far, in DIR/summary.md and DIR/summary.json, at any time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import hour_report
from hour_process import Ran

WAITING, RUNNING, DONE, SKIPPED, FAILED, OVER, CUT, LEFT_OUT = (
    "waiting",
    "running",
    "done",
    "skipped",  # exit code 0 without measurements, and without packages by --site
    "failed",
    "ran over its limit",
    "cut off",
    "not run",
)


class Summary:
    """The states of the parts, and their results.

    Args:
        out: folder of the files of the parts.
        parts: names of the parts, in the order in which they run.
    """

    def __init__(self, out: Path, parts: list[str]) -> None:
        self._out = out
        self._states: dict[str, dict[str, Any]] = {name: {"state": WAITING, "seconds": 0.0, "why": ""} for name in parts}
        self._site: dict[str, Any] | None = None
        self._begun = time.monotonic()
        self.write()

    @property
    def all_well(self) -> bool:
        """True if all parts, and the unpacking of their packages, succeeded."""
        states = [*self._states.values(), *([self._site] if self._site else [])]
        return all(each["state"] in (DONE, SKIPPED) for each in states)

    def begin(self, name: str) -> None:
        """Note that a part runs."""
        self._states[name] |= {"state": RUNNING, "begun": time.monotonic()}
        self.write()

    def end(self, name: str, ran: Ran) -> None:
        """Record the end of a part, with its output if the part reports no failure itself."""
        found, why = self._found(name), ""
        if ran.code is None:
            state, why = OVER, f"{'it could not be killed' if ran.stuck else 'killed'} after {ran.seconds:.0f} s"
        elif ran.code == 0 and found is not None and not found["failed"]:
            state = DONE if found["rows"] else SKIPPED
            if state == SKIPPED and self._site is not None:  # with --site, the part must measure
                state, why = (
                    FAILED,
                    "nothing was measured, although packages were given by --site: see what it skipped",
                )
        else:
            state = FAILED
            why = "" if found is not None and found["failed"] else f"exit code {ran.code}; it printed: {ran.printed}"
        self._states[name] = {"state": state, "seconds": ran.seconds, "why": why}
        for left in self._out.glob(f"part_{name}.*"):
            if left.suffix != ".json":  # the summary contains its page, so fewer files remain
                left.unlink()
        self.write()

    def site(self, ran: Ran) -> None:
        """Record the result of unpacking the packages."""
        if ran.code == 0:
            self._site = {"state": DONE, "seconds": ran.seconds, "why": ""}
        else:
            end = "over its limit" if ran.code is None else f"exit code {ran.code}"
            self._site = {"state": FAILED, "seconds": ran.seconds, "why": f"{end}; it printed: {ran.printed}"}
        self.write()

    def leave_out(self, name: str, why: str) -> None:
        """Record that a part does not run."""
        self._states[name] |= {"state": LEFT_OUT, "why": why}
        self.write()

    def cut_off(self, why: str) -> None:
        """Record that no more parts run."""
        for name, about in self._states.items():
            if about["state"] == RUNNING:
                self._states[name] = {"state": CUT, "seconds": time.monotonic() - about["begun"], "why": why}
            elif about["state"] == WAITING:
                about |= {"state": LEFT_OUT, "why": why}
        self.write()

    def write(self) -> None:
        """Write both files with the results of the parts so far."""
        minutes = (time.monotonic() - self._begun) / 60
        parts = {name: {**about, "found": self._found(name)} for name, about in self._states.items()}
        for about in parts.values():
            about.pop("begun", None)
        content = {"minutes": minutes, "site": self._site, "parts": parts, "figures": self.figures()}
        hour_report.replace(self._out / "summary.json", json.dumps(content, indent=2) + "\n")
        pages = [self.overview(), *([self.of_site()] if self._site else []), *(self.page(name) for name in self._states)]
        hour_report.replace(self._out / "summary.md", "\n".join(pages))

    def figures(self) -> dict[str, float]:
        """Return the figures of all parts, as ``part.name``."""
        found = {name: self._found(name) for name in self._states}
        return {f"{name}.{key}": value for name, said in found.items() if said for key, value in said["figures"].items()}

    def overview(self) -> str:
        """Return the table of the parts."""
        lines = ["# First hour", "", "| part | state | seconds | rows | skipped | failed |", "|---|---|--:|--:|--:|--:|"]
        for name, about in self._states.items():
            found = self._found(name) or {"rows": [], "skipped": [], "failed": []}
            counts = " | ".join(str(len(found[what])) for what in ("rows", "skipped", "failed"))
            lines.append(f"| {name} | {about['state']} | {about['seconds']:.0f} | {counts} |")
        return "\n".join(lines) + "\n"

    def page(self, name: str) -> str:
        """Return the results of a part as Markdown, and the reason if it did not end by itself."""
        found, about = self._found(name), self._states[name]
        page = hour_report.markdown(found) if found is not None else f"## {name}\n"
        state = "" if about["state"] in (DONE, SKIPPED) else f"\n{about['state']}{': ' if about['why'] else ''}{about['why']}\n"
        return page + state

    def of_site(self) -> str:
        """Return the result of unpacking the packages."""
        assert self._site is not None
        return f"## site\n\n{self._site['state']}, {self._site['seconds']:.0f} s {self._site['why']}".rstrip() + "\n"

    def _found(self, name: str) -> dict[str, Any] | None:
        path = self._out / f"part_{name}.json"
        return json.loads(path.read_text()) if path.exists() else None
