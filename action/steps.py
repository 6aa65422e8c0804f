"""What the action's steps do with JSON and with GitHub's interface; the standard library only.

steps.py base-of-event EVENT | report FOLDER | sarif FOLDER | comment REPORT EVENT
steps.py outputs FOLDER DIFF CHECK REPORT | verdict FOLDER DIFF CHECK FAIL_ON
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MARKER = "<!-- memir: training memory -->"  # finds the comment again
LIMIT = 60_000  # characters; a comment may have 65,536


def base_of_event(event: str) -> str:
    """The commit that a pull request is to be merged into, or that a push came after; "" where the event says neither."""
    data = _json(Path(event))
    base = data.get("pull_request", {}).get("base", {}).get("sha") or data.get("before") or ""
    return "" if set(base) == {"0"} else base


def report(folder: Path) -> str:
    """The Markdown of all parts, under one heading."""
    parts = [MARKER, "### Training memory"]
    files = [*sorted(folder.glob("diff-*.md")), folder / "check.md"]
    parts += [file.read_text(encoding="utf-8").strip() for file in files if file.exists()]
    return "\n\n".join(parts) + "\n"


def sarif(folder: Path) -> str:
    """The logs of all parts as one: their runs, one after the other."""
    logs = [_json(path) for path in sorted(folder.glob("*.sarif"))]
    whole = {**(logs[0] if logs else {"version": "2.1.0"}), "runs": []}
    for log, path in zip(logs, sorted(folder.glob("*.sarif")), strict=True):
        for run in log["runs"]:
            whole["runs"].append({**run, "automationDetails": {"id": f"memir/{path.stem}/"}})
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def comment(text: str, event: str) -> str:
    """Writes the report as a comment of the pull request, or over the one that is there; says what it did."""
    pull = _json(Path(event)).get("pull_request")
    token, repository = os.environ.get("MEMIR_TOKEN", ""), os.environ.get("GITHUB_REPOSITORY", "")
    if not pull:
        return "no pull request: the report is in the summary"
    if not token or (pull.get("head", {}).get("repo") or {}).get("full_name") != repository:
        return "a fork, or no token: the report is in the summary"
    api = f"{os.environ.get('GITHUB_API_URL', '')}/repos/{repository}/issues"
    body = text if len(text) <= LIMIT else text[:LIMIT] + "\n\n(shortened: the whole report is in the job's summary)\n"
    try:
        page, found = 1, None
        while found is None:
            batch = _ask(f"{api}/{pull['number']}/comments?per_page=100&page={page}", token)
            found = next((c["url"] for c in batch if c["body"].startswith(MARKER)), None)
            page += 1
            if len(batch) < 100:
                break
        if found:
            _ask(found, token, "PATCH", {"body": body})
            return "the comment is up to date"
        _ask(f"{api}/{pull['number']}/comments", token, "POST", {"body": body})
        return "commented"
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        return f"::warning title=memir::the comment could not be written: {error}"


def _ask(url: str, token: str, method: str = "GET", data: dict[str, str] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json", "User-Agent": "memir"}
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def status(folder: Path, diff: int, check: int) -> str:
    """What is the gravest: budget, increase, inconclusive or ok."""
    scenarios = _json(folder / "check.json").get("scenarios", [])
    found = {item["status"] for item in scenarios}
    if "over budget" in found:
        return "budget"
    if "regressed" in found or (not scenarios and any(d > 0 for d in _deltas(folder))):
        return "increase"
    return "ok" if diff == check == 0 else "inconclusive"


def _sides(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("diff-*.json")):
        data = _json(path)
        found += list(data["scenarios"].values()) if "scenarios" in data else [data]
    return found


def _deltas(folder: Path) -> list[int]:
    return [side["delta_bytes"] for side in _sides(folder) if "delta_bytes" in side]


def outputs(folder: Path, diff: int, check: int, where: str) -> str:
    """The action's outputs, a line each."""
    peaks = [side["after_bytes"] for side in _sides(folder) if side.get("after_bytes")]
    scenarios = _json(folder / "check.json").get("scenarios", [])
    peaks += [item["requested_bytes"] for item in scenarios if "requested_bytes" in item]
    values = {
        "status": status(folder, diff, check),
        "peak-bytes": max(peaks, default=""),
        "delta-bytes": max(_deltas(folder), default=""),
        "report": where,
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def verdict(folder: Path, diff: int, check: int, fail_on: str) -> int:
    """The job's exit code. A usage error or a bug (2, 4) always fails, but for `never`."""
    grave = {"never": (), "budget": ("budget",), "increase": ("budget", "increase")}
    failing = grave.get(fail_on, ("budget", "increase", "inconclusive"))
    broken = fail_on != "never" and not {diff, check} <= {0, 1, 3}
    return 1 if broken or status(folder, diff, check) in failing else 0


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main(words: list[str]) -> int:
    """Run a command, print what it gives."""
    command, *rest = words
    if command == "verdict":
        return verdict(Path(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    if command == "outputs":
        text = outputs(Path(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    elif command == "comment":
        text = comment(Path(rest[0]).read_text(encoding="utf-8"), rest[1]) + "\n"
    elif command == "base-of-event":
        text = base_of_event(rest[0]) + "\n"
    else:
        text = {"report": report, "sarif": sarif}[command](Path(rest[0]))
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
