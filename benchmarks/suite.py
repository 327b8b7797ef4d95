"""Runs the benchmarks of suite.cfg by name: ``python benchmarks/suite.py ladder_8 --data FOLDER``.

A name is a run or a group, and ``--list`` prints all names. A run writes its result and the former results to
benchmarks/results. ``make figures`` then writes the figures into the pages. Use a machine without other load.

The group ``quick`` writes no result. It fails if a threshold is missed, and takes less than three minutes. The group ``gpu``
requires a GPU.

``--data`` is a folder with the data sets that are not in the repository: ml-1m.seqs.npz, in which ``offsets`` are the
beginnings of the histories, and gowalla.train.txt.gz and yelp.txt.gz, with a user and the items on each line. ``--peers`` is
the folder in which benchmarks/fetch_peers.py has put the published code of other packages.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_OUTSIDE = {"{ml-1m}": "ml-1m.seqs.npz", "{gowalla}": "gowalla.train.txt.gz", "{yelp}": "yelp.txt.gz"}


def main() -> None:
    """Run the named benchmarks. Continue after a failed run, and exit with 1 at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of runs or groups")
    parser.add_argument("--list", action="store_true", help="print all names")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the data sets that are not in the repository")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="folder with the published code of other packages")
    options = parser.parse_args()
    groups = read_groups()
    runs = {name: command for group in groups.values() for name, command in group.items()}
    if options.list or not options.names:
        print("\n".join(f"{group}: {', '.join(runs)}" for group, runs in groups.items()))
        return
    unknown = [name for name in options.names if name not in runs and name not in groups]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no run or group has this name; --list prints all names")
    names = [each for name in options.names for each in groups.get(name, [name])]
    if (for_gpu := set(names) & set(groups["gpu"])) and shutil.which("nvidia-smi") is None:
        parser.error(f"{', '.join(sorted(for_gpu))} require a GPU, and this machine has none")
    commands = {name: _command(name, runs[name], options, parser) for name in names}
    for name in set(names) - set(groups["quick"]):
        commands[name] += ["--json", str(RESULTS / f"{name}.json")]
    failed = [name for name, command in commands.items() if not _run(name, command)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def read_groups() -> dict[str, dict[str, str]]:
    """Return the commands by group and name."""
    config = configparser.ConfigParser(interpolation=None)
    config.read_string((Path(__file__).parent / "suite.cfg").read_text())
    return {group: {name: " ".join(command.split()) for name, command in config[group].items()} for group in config.sections()}


def _command(name: str, command: str, options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the words of a run's command, with the paths of the files that it reads."""
    words = command.split()
    places = {key: options.data and options.data / file for key, file in _OUTSIDE.items()} | {"{peers}": options.peers}
    missing = [key for key in places if key in words and not (places[key] and places[key].exists())]
    if missing:
        parser.error(f"{name} reads {', '.join(missing)}; pass --data or --peers with the folder that contains it")
    words = [str(places.get(word, word)) for word in words]
    scripts = [["--", sys.executable, f"benchmarks/{word}"] if re.fullmatch(r"[\w/]+\.py", word) else [word] for word in words]
    return [word for of_script in scripts for word in of_script][1:]


def _run(name: str, words: list[str]) -> bool:
    print(f"\n== {name}: {' '.join(words)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    print(f"== {name}: {time.monotonic() - began:.0f} s, exit code {done.returncode}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
