"""``freescale completion``: a script by which a shell completes commands, options, their choices, and files."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_freescale.command_line.main import COMMANDS


def run(command: str, arguments: list[str]) -> None:
    """Print it; exits with 2 and says what is wrong if it cannot."""
    shell = new_parser(command).parse_args(arguments).shell
    try:
        import jsonargparse  # noqa: F401 (whose parsers say what the training commands take)
        import shtab
    except ImportError as error:
        print(f"freescale {command}: {error}. Run pip install 'lightning-freescale[cli]'", file=sys.stderr)
        raise SystemExit(2) from error
    parser = argparse.ArgumentParser("freescale")
    parser.add_argument("--version", action="store_true", help="what is installed")
    below = parser.add_subparsers()
    for name, (room, text) in COMMANDS.items():
        parser_of: Any = import_module(f"lightning_freescale.command_line.{room}").new_parser
        _copy(parser_of(name), below.add_parser(name, help=text), shtab.FILE)
    print(shtab.complete(parser, shell))


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__)
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def _copy(parser: argparse.ArgumentParser, to: argparse.ArgumentParser, file: Any) -> None:
    """Add the options of a parser, which may be of jsonargparse, to one of argparse, which is all that shtab reads.

    ``file`` is how it completes files.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = to.add_subparsers()
            for name, each in action.choices.items():  # shtab hides those without help
                _copy(each, below.add_parser(name, help=""), file)
        elif not isinstance(action, argparse._HelpAction):
            taken: dict[str, Any] = {"action": "store_true"} if action.nargs == 0 else {"nargs": action.nargs}
            # of jsonargparse's own help some is made when it is printed
            text = action.help if isinstance(action.help, str) else None
            added: Any = to.add_argument(*(action.option_strings or [action.dest]), help=text, **taken)
            added.choices = action.choices
            if action.type is Path or action.dest == "config":
                added.complete = file
