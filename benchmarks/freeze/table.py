"""results.json as a page. Predictions, where there are any, stand beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE / "results.md"
MIB = 1 << 20

Predict = Callable[[int], tuple[int, float]]  # cut -> (peak bytes, time of a step as a ratio to cut 0), nothing measured


def load() -> dict[str, Any]:
    """What has been measured so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def save(results: Mapping[str, Any], predict: Predict | None) -> None:
    """Writes results.json and results.md."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results, predict), encoding="utf-8")


def page(results: Mapping[str, Any], predict: Predict | None) -> str:
    """results.md."""
    lines = [
        "# Freezing, measured",
        "",
        "Written by `python -m benchmarks.freeze`; what each figure is: [README.md](README.md).",
    ]
    for title in ("machine", "versions"):
        if title in results:
            lines += ["", f"{title}: " + ", ".join(f"{name} {value}" for name, value in results[title].items())]
    if "pretrain" in results:
        lines += ["", *_pretrain(results["pretrain"])]
    if "memory" in results:
        lines += ["", "## Live bytes of a step", "", *_memory(results["memory"], predict)]
    if "steps" in results:
        lines += ["", "## Time of a step", "", *_steps(results["steps"], predict)]
    if "finetune" in results:
        lines += ["", "## AutoFreeze with its cache, beside full fine-tuning", "", *_finetune(results["finetune"])]
    return "\n".join(lines) + "\n"


def _pretrain(found: Mapping[str, Any]) -> list[str]:
    return [
        f"model: {found['parameters'] / 1e6:.1f} M parameters, vocabulary of {found['vocabulary']:,}, pretrained on "
        f"{found['tokens']:,} tokens of Python's standard library in {found['steps']} steps "
        f"({found['cpu_seconds']:.0f} s of CPU): loss {found['first_loss']:.2f} to {found['last_loss']:.2f}"
    ]


def _memory(found: Mapping[str, Any], predict: Predict | None) -> Iterator[str]:
    titles = ["cut", "between steps", "peak, measured", "MiB", "reached in"]
    titles += ["peak, predicted", "error"] if predict else []
    yield from _head(titles)
    for cut, row in found.items():
        cells = [cut, f"{row['at_start']:,}", f"{row['peak']:,}", f"{row['peak'] / MIB:.1f}", f"`{row['op']}`"]
        if predict:
            nbytes, _ = predict(int(cut))
            cells += [f"{nbytes:,}", f"{nbytes - row['peak']:+,}"]
        yield _row(cells)


def _steps(found: Mapping[str, Any], predict: Predict | None) -> Iterator[str]:
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    yield f"B={found['batch']}, S={found['seq']}, {threads}, medians of {found['rounds']} rounds over all cuts in turn."
    yield ""
    titles = ["cut", "CPU seconds", "ratio to cut 0", "wall, ratio", "cached, ratio", "cached, wall, ratio"]
    titles += ["ratio, predicted", "error"] if predict else []
    yield from _head(titles)
    cuts = found["cuts"]
    for cut in (name for name in cuts if "cached" not in name):
        cells = [cut, f"{cuts[cut]['cpu_seconds']:.3f}"]
        cells += [
            f"{cuts[name][clock] / cuts['0'][clock]:.3f}" if name in cuts else ""
            for name in (cut, f"{cut} cached")
            for clock in ("cpu_seconds", "wall_seconds")
        ]
        if predict:
            _, ratio = predict(int(cut))
            measured = cuts[cut]["cpu_seconds"] / cuts["0"]["cpu_seconds"]
            cells += [f"{ratio:.3f}", f"{100 * (ratio / measured - 1):+.1f} %"]
        yield _row(cells)


def _finetune(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{found['samples']} samples of {found['seq']} tokens of Python's language reference, batch {found['batch']}, "
        f"{found['epochs']} epochs, {found['intervals']} tests; epochs of both in turn; accuracy of the next token on "
        "held-out topics."
    )
    yield ""
    yield from _head(
        ["seed", "accuracy before", "full", "AutoFreeze", "CPU s, full", "AutoFreeze", "time ratio", "speed-up", "cut by epoch"]
    )
    ratios, differences = [], []
    for seed, row in found["seeds"].items():
        full, auto = row["full"], row["autofreeze"]
        ratio = sum(auto["cpu_seconds"]) / sum(full["cpu_seconds"])
        ratios.append(ratio)
        differences.append(auto["accuracy"] - full["accuracy"])
        scores = [f"{100 * found['accuracy']:.2f} %" for found in (row["before"], full, auto)]
        times = [f"{sum(found['cpu_seconds']):.1f}" for found in (full, auto)]
        yield _row([seed, *scores, *times, f"{ratio:.3f}", f"{1 / ratio:.2f}", ", ".join(map(str, auto["cuts"]))])
    yield ""
    yield (
        f"Mean over {len(ratios)} seeds: time ratio {mean(ratios):.3f} (speed-up {1 / mean(ratios):.2f}), "
        f"accuracy {100 * mean(differences):+.2f} points."
    )
    caches = [row["autofreeze"]["cache"] for row in found["seeds"].values()]
    hits, misses = (sum(cache[name] for cache in caches) for name in ("hits", "misses"))
    ahead = sum(cache["ahead"] for cache in caches)
    yield f"Of {hits + misses} batches behind a cut {hits} began from the cache, {ahead} of them read ahead."
    if "note" in found:
        yield f"\nNote: {found['note']}"


def _head(titles: list[str]) -> Iterator[str]:
    yield _row(titles)
    yield _row(["---"] * len(titles))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
