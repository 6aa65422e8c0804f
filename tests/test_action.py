"""The GitHub action's steps, run as the shell script that they are: a faked event, summary, output file and interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sarif import results
from tests.test_diff_revisions import commit, git

ROOT = Path(__file__).resolve().parents[1]
BEFORE, AFTER = (ROOT / "tests/regressions/logits_kept_on_module" / f"{name}.py" for name in ("before", "after"))
REAL = f'#!/bin/sh\nexport PYTHONPATH="{ROOT}" MEMIR_NO_CACHE=1\nexec "{sys.executable}" -m memir "$@"\n'
CANNED = """#!/bin/sh
# memir with canned answers: what it was asked goes to calls, --also files get the text of ANSWERS/COMMAND.FORMAT
echo "$@" >> "$ANSWERS/calls"
command=$1
for word in "$@"; do
  case "$word" in *=*) [ ! -f "$ANSWERS/$command.${word%%=*}" ] || cp "$ANSWERS/$command.${word%%=*}" "${word#*=}" ;; esac
done
[ ! -f "$ANSWERS/$command.github" ] || cat "$ANSWERS/$command.github"
[ ! -f "$ANSWERS/$command.error" ] || cat "$ANSWERS/$command.error" >&2
exit $(cat "$ANSWERS/$command.code" 2>/dev/null || echo 0)
"""


@dataclass
class Api:
    """GitHub's interface for comments, in this process."""

    comments: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def api() -> Iterator[Api]:
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def read(self) -> str:
            state.asked.append(f"{self.command} {self.path} {self.headers['Authorization']}")
            return str(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}").get("body", ""))

        def do_GET(self) -> None:
            self.read()
            self.answer(state.comments if self.path.endswith("&page=1") else [])

        def do_POST(self) -> None:
            state.comments.append({"url": f"{state.url}/one/{len(state.comments)}", "body": self.read()})
            self.answer({})

        def do_PATCH(self) -> None:
            state.comments[int(self.path.rpartition("/")[2])]["body"] = self.read()
            self.answer({})

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Job:
    """A checked-out pull request and the runner's files."""

    folder: Path
    files: Path
    base: str
    api: Api

    def run(self, memir: str, event: Any = None, **inputs: str) -> subprocess.CompletedProcess[str]:
        """The steps with these inputs and this program in memir's place."""
        tools = self.files / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "memir").write_text(memir)
        (tools / "memir").chmod(0o755)
        if not (tools / "python3").exists():
            (tools / "python3").symlink_to(sys.executable)
        pull = {"number": 7, "base": {"sha": self.base}, "head": {"repo": {"full_name": "me/model"}}}
        (self.files / "event.json").write_text(json.dumps({"pull_request": pull} if event is None else event))
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MEMIR", "GITHUB"))},
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "ANSWERS": str(self.files),
            "GITHUB_EVENT_PATH": str(self.files / "event.json"),
            "GITHUB_STEP_SUMMARY": str(self.files / "summary.md"),
            "GITHUB_OUTPUT": str(self.files / "output"),
            "GITHUB_REPOSITORY": "me/model",
            "GITHUB_API_URL": self.api.url,
            "RUNNER_TEMP": str(self.files),
            "MEMIR_TOKEN": "secret",
            **{f"MEMIR_{name.upper()}": value for name, value in inputs.items()},
        }
        script = str(ROOT / "action" / "run.sh")
        return subprocess.run(["bash", script], cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def put(self, **files: str) -> None:
        """Canned answers: `diff_json="{}"` is the file diff.json."""
        for name, text in files.items():
            (self.files / name.replace("_", ".", 1)).write_text(text)

    @property
    def outputs(self) -> dict[str, str]:
        """What the last step put out."""
        return dict(line.split("=", 1) for line in (self.files / "output").read_text().splitlines())

    @property
    def summary(self) -> str:
        """The job's summary."""
        return (self.files / "summary.md").read_text()


@pytest.fixture
def job(tmp_path: Path, api: Api) -> Job:
    folder, files = tmp_path / "checked out", tmp_path / "runner"
    folder.mkdir()
    files.mkdir()
    git(folder, "init", "-q", "-b", "main")
    base = commit(folder, "before", {"model.py": BEFORE.read_text()})
    shutil.copy(AFTER, folder / "model.py")
    commit(folder, "after", {})
    return Job(folder, files, base, api)


def test_a_pull_request_from_end_to_end(job: Job, tmp_path: Path) -> None:
    budget = '[scenarios.step]\ntarget = "model.py"\nbatch = 4\nseq = 64\nmax_order = "B*S"\n'
    (job.folder / "memir.toml").write_text(budget)
    done = job.run(REAL, sarif=str(tmp_path / "out.sarif"))
    assert done.returncode == 0, done.stdout + done.stderr  # the scenario keeps its budget; without a baseline nothing grew
    (annotation,) = [line for line in done.stdout.splitlines() if line.startswith("::")]
    line = AFTER.read_text().splitlines().index("        self.last_logits = logits") + 1
    assert annotation.startswith(
        f"::warning file=model.py,line={line},title=memir%3A peak-regression (MEM002)::step: the peak grew"
    )
    assert job.outputs["status"] == "ok"
    assert int(job.outputs["delta-bytes"]) == 4 * 64 * 512 * 2
    assert "Because of `self.last_logits = logits` at `model.py:" in job.summary
    assert [comment["body"] for comment in job.api.comments] == [job.summary]
    data = json.loads((tmp_path / "out.sarif").read_text())
    assert [run["automationDetails"]["id"] for run in data["runs"]] == ["memir/check/", "memir/diff-1/"]
    for run in data["runs"]:
        results(json.dumps({**data, "runs": [run]}))
    assert git(job.folder, "status", "--porcelain") == "?? memir.toml"


OVER = json.dumps({"scenarios": [{"status": "over budget", "requested_bytes": 5}]})
OK = json.dumps({"scenarios": [{"status": "ok", "requested_bytes": 5}]})
GREW = json.dumps({"delta_bytes": 3, "after_bytes": 9})


@pytest.mark.parametrize(
    ("files", "inputs", "status", "code"),
    [
        ({"check_json": OK}, {}, "ok", 0),
        ({"check_json": OVER, "check_code": "1"}, {}, "budget", 1),
        ({"check_json": OVER, "check_code": "1"}, {"fail_on": "budget"}, "budget", 1),
        ({"check_json": OVER, "check_code": "1"}, {"fail_on": "never"}, "budget", 0),
        ({"diff_json": GREW}, {"target": "model.py"}, "increase", 1),
        ({"diff_json": GREW}, {"target": "model.py", "fail_on": "budget"}, "increase", 0),
        ({"diff_json": GREW, "check_json": OK}, {}, "ok", 0),  # the check allows it
        ({"check_json": OK, "check_code": "3"}, {}, "inconclusive", 0),
        ({"check_json": OK, "check_code": "3"}, {"fail_on": "inconclusive"}, "inconclusive", 1),
        ({"check_error": "error: no configuration\n", "check_code": "2"}, {}, "inconclusive", 1),
    ],
)
def test_what_fails_the_job(job: Job, files: dict[str, str], inputs: dict[str, str], status: str, code: int) -> None:
    job.put(**files)
    done = job.run(CANNED, comment="never", **inputs)
    assert (job.outputs["status"], done.returncode) == (status, code), done.stdout + done.stderr
    if "check_error" in files:
        assert "error: no configuration" in job.summary
        assert "error: no configuration" in done.stderr
    assert job.api.asked == []


def test_one_comment_is_kept_up_to_date(job: Job) -> None:
    job.put(check_json=OK, check_markdown="first")
    job.api.comments.append({"url": f"{job.api.url}/one/0", "body": "somebody else's"})
    job.run(CANNED)
    job.put(check_markdown="second")
    job.run(CANNED)
    assert len(job.api.comments) == 2
    assert job.api.comments[0]["body"] == "somebody else's"
    assert "second" in job.api.comments[1]["body"]
    assert all(asked.endswith(" Bearer secret") for asked in job.api.asked)


@pytest.mark.parametrize("case", ["fork", "no token", "push", "api is down"])
def test_without_a_comment_the_summary_is_written(job: Job, case: str) -> None:
    job.put(check_json=OK, check_markdown="the report")
    pull = {"number": 7, "base": {"sha": job.base}, "head": {"repo": {"full_name": "fork/model"}}}
    event = {"fork": {"pull_request": pull}, "push": {"before": job.base}}.get(case)
    if case == "api is down":
        job.api.url = "http://127.0.0.1:9"
    done = job.run(CANNED, event, **({"token": ""} if case == "no token" else {}))
    assert done.returncode == 0
    assert job.summary.startswith("<!-- memir: training memory -->\n\n### Training memory\n\nthe report")
    assert job.api.comments == []
    assert job.base in (job.files / "calls").read_text()


def test_the_base_is_the_merge_base_and_scenarios_are_asked_by_name(job: Job) -> None:
    git(job.folder, "checkout", "-q", "-b", "other", job.base)
    tip = commit(job.folder, "later on main", {"other.py": "x = 1\n"})
    git(job.folder, "checkout", "-q", "main")
    job.base, before = tip, job.base
    job.run(CANNED, comment="never", scenarios="a b")
    calls = [line.split(" --format")[0] for line in (job.files / "calls").read_text().splitlines()]
    assert calls == [f"diff {before} . a", f"diff {before} . b", "check a b"]


def test_bad_inputs_are_said(job: Job) -> None:
    for inputs in ({"fail_on": "always"}, {"comment": "loudly"}):
        done = job.run(CANNED, **inputs)
        assert done.returncode == 2
        assert done.stdout.startswith("::error title=memir::")


def test_the_action_s_inputs_are_the_script_s_variables() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    assert {name.removeprefix("MEMIR_").lower().replace("_", "-") for name in step["env"]} == set(action["inputs"]) - {
        "install"
    }
    script = (ROOT / "action" / "run.sh").read_text() + (ROOT / "action" / "steps.py").read_text()
    assert all(name in script for name in step["env"])
    written = set(yaml.safe_load((ROOT / "action.yml").read_text())["outputs"])
    assert written == {"status", "peak-bytes", "delta-bytes", "report"}
