"""Fetch the published code that ours is measured against into a folder outside the project: ``python fetch_peers.py FOLDER``.

verl's and NVIDIA's files come from their repositories at the commits below, with their licences; NVIDIA's C++ is compiled with
the flags of its setup.py; Hugging Face's transformers comes from the package index. None of it becomes part of the project.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A repository, the commit, and the files of it that are needed."""

    url: str
    commit: str
    files: tuple[str, ...]


SOURCES = {
    "verl": Source(
        "https://github.com/volcengine/verl",
        "b178a3cd56f58b2d502255daba591e92833930a7",
        ("verl/utils/seqlen_balancing.py", "LICENSE", "Notice.txt"),
    ),
    "recsys-examples": Source(
        "https://github.com/NVIDIA/recsys-examples",
        "43465aeabf61515e28d74cbb5234ff7c627dcc19",
        ("examples/commons/perf_model/partitioner.py", "examples/commons/perf_model/csrc/kk_partition.cpp", "LICENSE"),
    ),
}
TRANSFORMERS = "transformers==5.23.0"


def main(arguments: list[str] | None = None) -> None:
    """Fetch all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to create, outside of the repository")
    parser.add_argument(
        "--from",
        action="append",
        default=[],
        dest="clones",
        metavar="NAME=PATH",
        help=f"use a local clone or bare repository for {' or '.join(SOURCES)}",
    )
    parser.add_argument("--no-transformers", action="store_true", help="do not install Hugging Face transformers")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.is_relative_to(Path(__file__).resolve().parents[1]):
        parser.error(f"folder {options.folder} is inside the project, which others' code is not to enter: choose one outside")
    clones = dict(pair.partition("=")[::2] for pair in options.clones)
    if clones.keys() - SOURCES.keys():
        parser.error(f"--from {' '.join(options.clones)}: write NAME=PATH with a name of {', '.join(SOURCES)}")
    for name, source in SOURCES.items():
        fetch(source, folder / name, clones.get(name))
        print(f"{name}: {source.commit[:12]} of {clones.get(name, source.url)}")
    compile_partitioner(folder / "recsys-examples")
    if not options.no_transformers:
        # after installed packages on sys.path, so its dependencies are used only if they are missing
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--target",
            str(folder / "site"),
            TRANSFORMERS,
        ]
        subprocess.run(command, check=True)
        print(TRANSFORMERS)


def fetch(source: Source, into: Path, clone: str | None = None) -> None:
    """Write the files of ``source`` below ``into``, from GitHub or from a clone that has the commit."""
    into.mkdir(parents=True, exist_ok=True)
    if clone is None:
        clone = str(into / "fetched.git")
        if not Path(clone).exists():
            _git("init", "--quiet", "--bare", clone)
        _git("-C", clone, "remote", "remove", "origin", check=False)
        _git("-C", clone, "remote", "add", "origin", source.url)
        _git("-C", clone, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", source.commit)
    for name in source.files:
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_git("-C", clone, "show", f"{source.commit}:{name}"))


def compile_partitioner(folder: Path) -> None:
    """Compile NVIDIA's C++ to where its Python looks for it."""
    from torch.utils.cpp_extension import include_paths  # pybind11 is among torch's headers, as for NVIDIA's own build

    compiler = shutil.which("c++")
    if compiler is None:
        print("recsys-examples: no C++ compiler (c++), so its Python is measured instead")
        return
    source = folder / "examples/commons/perf_model/csrc/kk_partition.cpp"
    library = folder / f"examples/commons/kk_cpu_ops{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    flags = ["-O3", "-std=c++17", "-fvisibility=hidden", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, *includes, str(source), "-o", str(library)], check=True)


def _git(*command: str, check: bool = True) -> bytes:
    ended = subprocess.run(["git", *command], capture_output=True)
    if check and ended.returncode:
        sys.exit(f"git {' '.join(command)}: {ended.stderr.decode().strip()}\nPass --from NAME=PATH to take it from a clone")
    return ended.stdout


if __name__ == "__main__":
    main()
