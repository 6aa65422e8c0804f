"""memir check says the same, byte for byte: in any order of scenarios, with any hash seed, with any number of processes, cached
or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """\
[defaults]
batch = 2
seq = 32

[scenarios.one]
target = "{root}/tests/regressions/mask_expanded/after.py"
max = "1KiB"
max_order = "B*S"

[scenarios.two]
target = "{root}/tests/regressions/head_tied/before.py"
max_saved_per_layer = "1GiB"
"""


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    (tmp_path / "memir.toml").write_text(CONFIG.format(root=ROOT.as_posix()))
    forms = ("json", "markdown", "github", "sarif")
    written = []
    runs = (("1", ("one", "two"), ()), ("2", ("two", "one"), ("-j", "1")), ("3", (), ("--no-cache",)))
    for seed, names, options in runs:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "MEMIR_CACHE_DIR": str(tmp_path / "cache")}
        env.pop("MEMIR_NO_CACHE", None)
        also = [word for form in forms for word in ("--also", f"{form}={seed}.{form}")]
        baseline = tmp_path / "memir-baseline.json"
        baseline.unlink(missing_ok=True)
        command = [sys.executable, "-m", "memir", "check", *names, *options, "--update-baseline", *also]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        texts = [(tmp_path / f"{seed}.{form}").read_text() for form in forms]
        written.append([done.stdout, *texts, baseline.read_text()])
    assert written[0] == written[1] == written[2]
