"""Import the user's model file as Python would, and put the process back as it was."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import linecache
import os
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memir.errors import ParseError, UsageError
from memir.frontend.device import build_device
from memir.frontend.load_eager import eager_only
from memir.frontend.origin import shown_path

_SHARED = ("memir", "torch", "transformers", "numpy", "peft", "accelerate")  # never imported a second time


@dataclass(slots=True)
class Scope:
    """What the user's code needs around it while it runs: its folder on sys.path, its modules in sys.modules."""

    root: Path
    argv: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()  # top-level packages of the same name from elsewhere, out of sight while it runs
    notes: list[str] = field(default_factory=list)  # uses of torch.compile that were left out

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the user's code within. Everything global it changes is put back: modules, path, cwd, argv, torch's defaults.

        What it prints goes to stderr, nothing is compiled, no bytecode is written, and its warnings are its own affair.
        """
        path, argv, cwd, bytecode = list(sys.path), list(sys.argv), Path.cwd(), sys.dont_write_bytecode
        dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        aside = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in self.hidden or name in self.modules}
        for name in aside:
            del sys.modules[name]
        before = set(sys.modules)
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.root))
        sys.argv = [self.argv]
        sys.dont_write_bytecode = True
        try:
            with (
                warnings.catch_warnings(),
                redirect_stdout(sys.stderr),
                torch.random.fork_rng(devices=[]),
                eager_only(self.notes),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            for name, module in list(sys.modules.items()):
                if name not in before and self._owns(name, module):
                    self.modules[name] = sys.modules.pop(name)
            sys.modules.update(aside)
            sys.path[:], sys.argv, sys.dont_write_bytecode = path, argv, bytecode
            os.chdir(cwd)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            if torch.get_default_device() != device:
                torch.set_default_device(None if device == torch.device("cpu") else device)

    def _owns(self, name: str, module: ModuleType) -> bool:
        """Whether a module is the user's: its file (or package folder) lies under the root and not among installed packages."""
        top = name.partition(".")[0]
        if top in self.hidden or name in self.modules:
            return True
        places = [getattr(module, "__file__", None) or "", *list(getattr(module, "__path__", []))]
        inside = any(place and Path(place).resolve().is_relative_to(self.root) for place in places)
        return inside and top not in _SHARED and not any("site-packages" in Path(place).parts for place in places)


@dataclass(frozen=True, slots=True)
class UserModule:
    """The imported file: its module, its text as a tree, and the scope in which its code runs."""

    module: ModuleType
    path: Path
    tree: ast.Module
    scope: Scope

    @property
    def shown(self) -> str:
        """The path as messages show it."""
        return shown_path(str(self.path))


_SCOPES: WeakKeyDictionary[nn.Module, Scope] = WeakKeyDictionary()


def remember_scope(model: nn.Module, scope: Scope) -> None:
    """Tie a model to the scope of its code, for `user_scope`."""
    _SCOPES[model] = scope


@contextmanager
def user_scope(model: nn.Module) -> Iterator[None]:
    """The scope of a loaded model's own code, for running its forward later (lazy imports in it); plain for other models."""
    scope = _SCOPES.get(model)
    if scope is None:
        yield
    else:
        with scope.active():
            yield


def adopt_scope(model: nn.Module) -> None:
    """For a process that only runs this model: its code's folder and modules become importable for good; no more changes."""
    scope = _SCOPES.get(model)
    if scope is not None:
        sys.path.insert(0, str(scope.root))
        sys.modules.update(scope.modules)


def import_file(path: Path, run_on_meta: Callable[[ast.Module], bool] = lambda _: False) -> UserModule:
    """Import `path`: as part of its package when it lies in one (folders with `__init__.py`), else as a top-level module.

    `run_on_meta(tree)` says whether its top-level code is to build on the meta device (it makes the model while imported).
    UsageError: no such file, a syntax error, a missing package, anything that the file raises.
    """
    if not path.is_file():
        from memir.frontend.load_values import near_files

        raise UsageError(f"{path}: no such file", hint=near_files(path))
    path = path.resolve()
    tree = _parse(path)
    root, name = _package(path)
    top = name.partition(".")[0]
    scope = Scope(root, str(path))
    if "." in name:
        loaded = sys.modules.get(top)
        if loaded is not None and top not in _SHARED and not _is_from(loaded, root):
            scope.hidden = (top,)
    elif name in sys.modules or name in sys.stdlib_module_names:
        name = f"memir_target_{name}"
    with scope.active(), _messages(path.name, root), _meta_if(run_on_meta(tree)):
        module = importlib.import_module(name) if "." in name else _execute(name, path)
    return UserModule(module, path, tree, scope)


def import_module(dotted: str) -> UserModule:
    """Import `package.module` as `python -m` would from here (the working directory is on sys.path). Raises as import_file."""
    scope = Scope(Path.cwd().resolve(), dotted)
    with scope.active(), _messages(dotted, scope.root, dotted):
        module = importlib.import_module(dotted)
    file = getattr(module, "__file__", None)
    path = Path(file).resolve() if file else Path(dotted)
    tree = _parse(path) if path.suffix == ".py" else ast.Module([], [])
    return UserModule(module, path, tree, scope)


@contextmanager
def _meta_if(wanted: bool) -> Iterator[None]:
    if wanted:
        with torch.device(build_device()):
            yield
    else:
        yield


def _parse(path: Path) -> ast.Module:
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read(), filename=str(path))
    except SyntaxError as error:
        raise _syntax_error(error, path) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as Python", where=str(error)) from None


def _syntax_error(error: SyntaxError, path: Path) -> UsageError:
    name = shown_path(error.filename or str(path))
    if error.lineno is None:
        return UsageError(f"syntax error in {name}: {error.msg}")
    text = (error.text or "").rstrip("\n").expandtabs(1)
    return ParseError(
        f"syntax error in {Path(name).name}: {error.msg}",
        file=name,
        line=error.lineno,
        column=max(error.offset or 1, 1),
        text=text,
    )


def _package(path: Path) -> tuple[Path, str]:
    """The folder that goes on sys.path and the module's dotted name."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts) or path.stem


def _is_from(module: ModuleType, root: Path) -> bool:
    places = [getattr(module, "__file__", None) or "", *list(getattr(module, "__path__", []))]
    return any(place and Path(place).resolve().is_relative_to(root) for place in places)


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file", hint="a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def _messages(label: str, root: Path, dotted: str = "") -> Iterator[None]:
    """Turn whatever the file raises while imported into a message that names its line."""
    try:
        yield
    except UsageError:
        raise
    except SyntaxError as error:
        raise _syntax_error(error, root) from None
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if dotted and (dotted == missing or dotted.startswith(f"{missing}.")):
            raise UsageError(
                f"{dotted}: there is no module {missing!r} here", hint="for a file:  memir analyze path/model.py"
            ) from None
        hint = f"install it where memir runs:  pip install {missing.partition('.')[0]}"
        raise UsageError(
            f"{label} needs the package {missing!r}, which is not installed", where=user_line(error, (str(root),)), hint=hint
        ) from None
    except ImportError as error:
        hint = "an __init__.py in its folder makes it a package" if "relative import" in str(error) else ""
        where = f"{user_line(error, (str(root),))}\n{describe(error)}"
        raise UsageError(f"{label} cannot be imported", where=where, hint=hint) from None
    except SystemExit as error:
        where = user_line(error, (str(root),))
        hint = 'code that runs as a script belongs under  if __name__ == "__main__":'
        raise UsageError(f"{label} exits while it is imported", where=where, hint=hint) from None
    except Exception as error:  # a boundary: the user's file may raise anything
        where = f"{user_line(error, (str(root),))}\n{describe(error)}"
        raise UsageError(f"{label} fails while it is imported", where=where) from None


def describe(error: BaseException, lines: int = 4) -> str:
    """`ValueError: text`, at most a few lines of it."""
    text = "\n".join(str(error).strip().splitlines()[:lines])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def user_line(error: BaseException, roots: tuple[str, ...]) -> str:
    """`model.py:170   assert t <= block_size`: the innermost line under `roots` that an error went through, else ''."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        filename, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        installed = "site-packages" in filename and not any("site-packages" in root for root in roots)
        if not installed and any(filename == root or filename.startswith(root.rstrip(os.sep) + os.sep) for root in roots):
            found = f"{shown_path(filename)}:{line}   {linecache.getline(filename, line).strip()}"
        trace = trace.tb_next
    return found
