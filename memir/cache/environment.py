"""What every trace depends on here: Python, the installed packages, memir's own sources, variables that libraries read."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MEMIR = str(Path(__file__).resolve().parents[1])
# Of memir: what makes a program of a model, and what keeps it. Analyses run again on every hit and are not part of it.
_SOURCES = ("frontend", "ir", "cuda", "cache", "api.py", "recipe.py", "hardware", "__init__.py")
# Variables that torch, transformers, peft, accelerate and huggingface_hub read, by how their names begin.
_LIBRARIES = ("TORCH", "PYTORCH", "TRANSFORMERS_", "HF_", "HUGGINGFACE_", "PEFT_", "ACCELERATE_", "USE_")
_VARIABLES = (*_LIBRARIES, "PYTHONPATH", "HOME", "XDG_CACHE_HOME")  # the last two: where the Hugging Face cache is
_SYSTEM = tuple(f"{folder}{os.sep}" for folder in ("/proc", "/sys", "/dev") if os.name == "posix")


def signature() -> dict[str, object]:
    """Everything that any trace here depends on, as plain data."""
    return {
        "python": sys.version,
        "platform": sysconfig.get_platform(),
        "optimize": sys.flags.optimize,
        "packages": _packages(tuple(sys.path)),
        "path": _other_places(),
        "variables": sorted((name, value) for name, value in os.environ.items() if _is_read_by_libraries(name)),
        "memir": _own_sources(),
    }


def is_settled(before: dict[str, object]) -> bool:
    """Whether packages are as in the signature `before`, and memir's sources older than the process that imported them."""
    started = process_started()
    return signature()["packages"] == before["packages"] and all(path.stat().st_mtime_ns < started for path in _own_files())


def process_started() -> int:
    """When this process began, in nanoseconds since the epoch; where the system does not say, when memir looked here first."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return _IMPORTED
    return time.time_ns() - since_boot


_IMPORTED = time.time_ns()


def _is_read_by_libraries(name: str) -> bool:
    """Inductor's are left out: nothing is compiled, and torch sets one of them itself."""
    return name.startswith(_VARIABLES) and not name.startswith("TORCHINDUCTOR_")


def is_library(path: str) -> bool:
    """Whether a file or folder is Python's, an installed package's, memir's or the system's, and not the user's own code."""
    return path.startswith(_library_folders()) or "site-packages" in path or "dist-packages" in path


def is_memir(path: str) -> bool:
    """Whether a file is memir's own."""
    return path.startswith(MEMIR + os.sep)


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in path or "dist-packages" in path


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {MEMIR, *(os.path.join(MEMIR, linked) for linked in ("passes", "backends"))}
    folders |= {os.path.realpath(folder) for folder in folders}
    return (*(folder + os.sep for folder in sorted(folders)), *_SYSTEM)


def _packages(path: tuple[str, ...]) -> str:
    """The installed packages: what lies in each folder for packages, of which the names of *.dist-info hold every version.

    Of files, such as the *.pth of an editable installation, size and time too.
    """
    digest = hashlib.sha256()
    for folder in path:
        if not is_installed(folder):
            continue
        digest.update(f"\n{folder}\n".encode(errors="surrogateescape"))
        try:
            with os.scandir(folder) as entries:
                lines = sorted(_line(entry) for entry in entries if entry.name[:1] != "~" and entry.name != "__pycache__")
        except OSError:
            continue
        digest.update("\n".join(lines).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _line(entry: os.DirEntry[str]) -> str:
    if entry.is_dir():
        return entry.name
    stat = entry.stat()
    return f"{entry.name} {stat.st_size} {stat.st_mtime_ns}"


def _other_places() -> list[str]:
    """Further folders that modules are imported from. The first is that of the script that runs, or the working directory, and
    is left out: what is really imported from it is watched.
    """
    return [place for place in sys.path[1:] if not is_installed(place)]


def _own_sources() -> str:
    digest = hashlib.sha256()
    for path in _own_files():
        digest.update(f"{path.relative_to(MEMIR).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _own_files() -> Iterator[Path]:
    for name in _SOURCES:
        path = Path(MEMIR, name)
        found = [path] if path.is_file() else path.rglob("*")
        yield from sorted(p for p in found if p.suffix in (".py", ".json"))
