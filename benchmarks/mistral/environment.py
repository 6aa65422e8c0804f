"""The environment of the published run, as far as memir needs it: transformers, peft and accelerate of its versions.

torch is the tested one of constraints.txt, not the run's 2.4.1, which is older than memir's floor. memir is installed from this
checkout, editable and without its dependencies: peft 0.13.2 is older than what pyproject.toml asks for, and works here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINNED = {"transformers": "4.48.1", "peft": "0.13.2", "accelerate": "1.0.1"}
FREE = ("tokenizers", "huggingface-hub")  # as the pinned ones want them
NEEDED = ("torch", "sympy", "click", "pytest", "pytest-xdist", "hypothesis", "jsonschema")  # the last four run the tests


def default_folder() -> Path:
    """A folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memir" / f"transformers-{PINNED['transformers']}"


def constraints(tested: str) -> str:
    """constraints.txt with the versions of `PINNED`, and without those of `FREE`."""
    kept = []
    for line in tested.splitlines():
        name = line.partition("==")[0].strip()
        if name in PINNED:
            kept.append(f"{name}=={PINNED[name]}")
        elif name not in FREE:
            kept.append(line)
    return "\n".join(kept) + "\n"


def make(folder: Path) -> Path:
    """The Python of the environment in `folder`, made unless it is there and up to date. Exits with pip's own message."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pins = constraints((ROOT / "constraints.txt").read_text())
    digest = hashlib.sha256("\n".join((pins, str(ROOT), sys.version, *NEEDED)).encode()).hexdigest()
    stamp = folder / "memir.stamp"
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    print(f"making {folder} (once; PyTorch is large) ...", file=sys.stderr)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    (folder / "constraints.txt").write_text(pins)
    install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for arguments in (
        ("-c", str(folder / "constraints.txt"), *NEEDED, *PINNED),
        ("--no-deps", "-e", str(ROOT)),
    ):
        if subprocess.run([*install, *arguments], stdout=sys.stderr, check=False).returncode:
            sys.exit(f"error: pip could not install {' '.join(arguments)} into {folder}: see above")
    stamp.write_text(digest)
    return python
