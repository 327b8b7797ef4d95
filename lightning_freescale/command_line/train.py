"""``freescale fit``, ``validate``, ``test``, ``predict``: Lightning's command line with strategy ``"freescale"`` by default."""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

from lightning_freescale._lightning.loops import LightningDataModule, LightningModule, command_line


def run(command: str, arguments: list[str]) -> None:
    try:
        from jsonargparse import ActionConfigFile
    except ImportError as error:
        raise SystemExit(f"freescale {command}: {error}. Run pip install 'lightning-freescale[cli]'") from error

    lightning_parser: Any = command_line().LightningArgumentParser
    lightning_cli: Any = command_line().LightningCLI

    class Parser(lightning_parser):
        def error(self, message: str, ex: Exception | None = None) -> Any:
            super().error(message + _nearest(message, self), ex)

    class FreeScaleCLI(lightning_cli):
        def init_parser(self, **options: Any) -> Parser:
            parser = Parser(**options, allow_abbrev=False)
            parser.add_argument("-c", "--config", action=ActionConfigFile, help="a configuration file in YAML")
            return parser

    sys.path.insert(0, os.getcwd())  # so that user classes of this folder can be imported
    sys.argv = [sys.argv[0], command, *arguments]  # Lightning reads it, also to start the other ranks
    FreeScaleCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_defaults={"strategy": "freescale"},
        # without a logger the file is written to this folder, which may contain the user's config.yaml
        save_config_kwargs={"config_filename": "run_config.yaml", "overwrite": True},
    )


def _nearest(message: str, parser: Any) -> str:
    """Return a hint to the option most similar to a refused one; empty if none is similar."""
    refused = re.search(r"[Oo]ption '([^']+)'", message) or re.search(r"[Uu]nrecognized arguments: --(\S+)", message)
    if refused is None:
        return ""
    parsers = [parser, *(each for action in parser._actions for each in getattr(action, "_name_parser_map", {}).values())]
    known = {part for each in parsers for action in each._actions for part in action.dest.split(".")}
    for path in re.findall(r"class_path['\"]?[:=]\s*['\"]?([\w.]+)", _given_text()):
        known |= _parameters(path)
    for part in refused[1].partition("=")[0].split("."):
        if part not in known and (near := get_close_matches(part, known, 1)):
            return f". Did you mean {near[0]!r}?"
    return ""


def _given_text() -> str:
    """Return the command line and the configuration files in it."""
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    files = [word for word in words if word.endswith((".yaml", ".yml", ".json")) and os.path.isfile(word)]
    return "\n".join([*sys.argv[1:], *(Path(file).read_text() for file in files)])


def _parameters(path: str) -> set[str]:
    """Return the parameters of the class or function at an import path, including those of base classes."""
    try:
        found, owner = locate(path), locate(path.rpartition(".")[0])
    except ErrorDuringImport:
        return set()
    makers: list[Any] = [found] if callable(found) else []
    for each in filter(inspect.isclass, (found, owner)):
        makers += [vars(base)["__init__"] for base in inspect.getmro(each)[:-1] if "__init__" in vars(base)]
    names = set[str]()
    for maker in makers:
        with suppress(TypeError, ValueError):  # a class or a function in C has no signature
            names |= {*inspect.signature(maker).parameters}
    return names
