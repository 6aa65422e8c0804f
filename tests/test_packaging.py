"""What is installed: a wheel and an editable installation hold the same packages, by their long names only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = {"memir.passes": "passes", "memir.backends": "backends"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert module.__name__ == name
for short in ("passes", "backends"):
    try:
        importlib.import_module(short)
    except ImportError:
        continue
    raise SystemExit(f"{short} can be imported by its short name")
print(importlib.import_module("memir").__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def light_packages() -> list[str]:
    """Packages that import without torch and its dependencies, which a bare environment lacks."""
    return [
        name for name in SETTINGS["tool"]["setuptools"]["packages"] if not name.startswith(("memir.frontend", "memir.runtime"))
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, because building leaves files behind."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "memir", symlinks=True, ignore=NOT_SOURCE))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel, made as a release is made: from the source distribution."""
    run(sys.executable, "-m", "build", "--no-isolation", source, cwd=source.parent)
    (found,) = (source / "dist").glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with nothing but the wheel; its Python."""
    environment = folder / "environment"
    venv.EnvBuilder(with_pip=False).create(environment)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


def packages_of_the_tree() -> set[str]:
    found = {"memir"}
    for init in (ROOT / "memir").rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if len(parts) > 1 and parts[1] not in MAPPED.values():
            found.add(".".join(parts))
    for package, folder in MAPPED.items():
        assert not list((ROOT / folder).glob("*/**/__init__.py")), f"{folder} is flat"
        found.add(package)
    return found


def test_packages_in_pyproject_equal_the_tree() -> None:
    setuptools = SETTINGS["tool"]["setuptools"]
    assert packages_of_the_tree() == set(setuptools["packages"])
    assert setuptools["package-dir"] == MAPPED


def test_every_folder_with_code_is_a_package() -> None:
    for folder in ("memir", *MAPPED.values()):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("folder", MAPPED.values())
def test_links_in_the_package_point_to_the_root_folders(folder: str) -> None:
    link = ROOT / "memir" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", MAPPED.values())
def test_short_names_raise_import_error_from_the_root(folder: str) -> None:
    code = f"try:\n    import {folder}\nexcept ImportError as error:\n    print(error)"
    assert f"import memir.{folder}, not {folder}\n" == run(sys.executable, "-c", code, cwd=ROOT)


def test_wheel_holds_every_source_file_and_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"memir/py.typed"}
    for folder in ("memir", *MAPPED.values()):
        for pattern in ("*.py", "*.json"):
            for path in (ROOT / folder).rglob(pattern):
                parts = path.relative_to(ROOT).parts
                if parts[:2] not in {("memir", name) for name in MAPPED.values()}:
                    expected.add("/".join(parts if parts[0] == "memir" else ("memir", *parts)))
    assert set() == expected - names
    assert {"memir", f"memir-{SETTINGS['project']['version']}.dist-info"} == {name.split("/")[0] for name in names}


def test_wheel_installs_under_long_names_only(wheel: Path, tmp_path: Path) -> None:
    python = install(wheel, tmp_path)
    assert "site-packages" in import_all(python, tmp_path)


def test_editable_installation_works_from_anywhere(source: Path, tmp_path: Path) -> None:
    build = "import build, sys; print(build.ProjectBuilder(sys.argv[1]).build('editable', sys.argv[2]))"
    built = run(sys.executable, "-c", build, source, tmp_path, cwd=tmp_path)
    python = install(Path(built.splitlines()[-1]), tmp_path)
    assert str(source) in import_all(python, tmp_path)


def import_all(python: Path, folder: Path) -> str:
    """Import every light package there; click comes from this environment. The file that `memir` came from."""
    import click

    site = folder / "only-click"
    site.mkdir()
    (site / "click").symlink_to(Path(click.__file__).parent)
    code = f"import sys; sys.path.append({str(site)!r})\n{IMPORT_ALL}"
    return run(python, "-c", code, *light_packages(), cwd=folder)
