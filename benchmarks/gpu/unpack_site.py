"""Unpacks an archive of pack.py: a folder for PYTHONPATH with TorchRec and FBGEMM, on a machine without a network.

``python benchmarks/gpu/unpack_site.py site.tar.xz DIR`` needs Python alone and takes about a minute. It refuses an archive for
another Python, torch, CUDA, processor or GPU, and compares all files with the archive's checksum. DIR appears after all checks
pass and is printed last. If it already exists from the same archive, it is compared and kept.

The archive is a tar of ``manifest.json``, then ``host/FILE`` for each file without its GPU code, then ``gpu/FILE`` with the
GPU code that was kept. The manifest gives the position of each piece in its file; there are zeros between pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

FORMAT = 1
MANIFEST = "manifest.json"
_COPIED = ".site.json"  # the manifest in the folder, which names the archive
_CHUNK = 1 << 22


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="archive that pack.py wrote")
    parser.add_argument("target", type=Path, metavar="DIR", help="folder to create")
    options = parser.parse_args(arguments)
    try:
        said = unpack(options.archive, options.target)
    except (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        sys.exit(f"{options.archive}: not unpacked: {error}")
    print(said)
    print(options.target)


def unpack(archive: Path, target: Path) -> str:
    """Create ``target`` from an archive.

    Returns:
        One line that describes the result.

    Raises:
        ValueError: The archive is for another machine or damaged, or ``target`` is not what the archive holds.
        OSError, EOFError, lzma.LZMAError, tarfile.TarError: It is damaged, or the disk is full.
    """
    with lzma.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as members:
        manifest = _manifest(members)
        refuse_other_machine(manifest)
        text = json.dumps(manifest)
        if target.exists():
            if not (target / _COPIED).is_file() or (target / _COPIED).read_text() != text:
                raise ValueError(f"{target} exists and was not created from this archive: remove it or pass another folder")
            _verify(target, manifest)
            return f"{len(manifest['files'])} files are there already and as they should be"
        partial = target.with_name(f"{target.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        _write(members, manifest, partial)
    _verify(partial, manifest)
    (partial / _COPIED).write_text(text)
    partial.rename(target)
    return f"{len(manifest['files'])} files unpacked, all checksums right"


def refuse_other_machine(manifest: dict[str, Any]) -> None:
    """Compare the target machine of the archive with this machine.

    Raises:
        ValueError: They differ.
    """
    _compare("Python", manifest["python"], ".".join(map(str, sys.version_info[:2])))
    _compare("a processor", manifest["machine"], platform.machine())
    found = find_spec("torch")  # which does not import it
    if found is None or found.origin is None:
        raise ValueError(f"packed for torch {manifest['torch']}, but torch is not installed here")
    torch = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    _compare("torch", _release(manifest["torch"], 2), _release(torch["__version__"], 2))  # FBGEMM is built for a minor version
    _compare("CUDA", _release(manifest["cuda"], 1), _release(torch["cuda"] or "none", 1))  # and links CUDA by its major version
    for capability in _compute_capabilities():
        _compare("a GPU of architecture", manifest["arch"], int(capability.replace(".", "")))


def _compare(what: str, packed: object, here: object) -> None:
    if packed != here:
        raise ValueError(f"packed for {what} {packed}, but this machine has {here}: pack again for this machine")


def _release(version: str, numbers: int) -> str:
    return ".".join(version.split("+")[0].split(".")[:numbers])


def _compute_capabilities() -> list[str]:
    """Return those of the GPUs; empty if nvidia-smi is missing or finds no GPU, which only the first use of a GPU can show."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        print("GPUs not compared with the archive: nvidia-smi is not installed", file=sys.stderr)
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        said = done.stdout.strip() or done.stderr.strip()
        print(f"GPUs not compared with the archive: nvidia-smi says {said}", file=sys.stderr)
        return []
    return done.stdout.split()


def _manifest(members: tarfile.TarFile) -> dict[str, Any]:
    first = members.next()
    content = members.extractfile(first) if first is not None and first.name == MANIFEST else None
    if content is None:
        raise ValueError(f"its first member is not {MANIFEST}, so it is no archive of pack.py")
    manifest = json.load(content)
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, but this script reads {FORMAT}: use both scripts of one commit")
    for file in manifest["files"]:
        path = PurePosixPath(file["name"])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{file['name']} would lie outside of the folder")
    return manifest


def _write(members: tarfile.TarFile, manifest: dict[str, Any], folder: Path) -> None:
    """Write each member to the positions of its pieces."""
    files = {file["name"]: file for file in manifest["files"]}
    for member in members:
        if member.name == MANIFEST:
            continue
        part, _, name = member.name.partition("/")
        content = members.extractfile(member)
        if content is None or part not in ("host", "gpu") or name not in files:
            raise ValueError(f"{member.name} is not in its manifest")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as out:
            out.truncate(files[name]["size"])  # bytes outside of the pieces are a hole, which reads as zeros
            for start, size in files[name][part]:
                out.seek(start)
                _copy(content, out, size, member.name)
        path.chmod(0o755 if files[name]["executable"] else 0o644)


def _copy(content: IO[bytes], out: IO[bytes], size: int, name: str) -> None:
    while size:
        chunk = content.read(min(size, _CHUNK))
        if not chunk:
            raise ValueError(f"{name} ends {size} bytes early")
        out.write(chunk)
        size -= len(chunk)


def _verify(folder: Path, manifest: dict[str, Any]) -> None:
    for file in manifest["files"]:
        path = folder / file["name"]
        if not path.is_file():
            raise ValueError(f"{path} is missing: remove {folder} and unpack again")
        if path.stat().st_size != file["size"] or digest(path) != file["sha256"]:
            raise ValueError(f"{path} does not have the size and checksum of the manifest: remove {folder} and unpack again")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


if __name__ == "__main__":
    main()
