"""Peak memory against the sequence length for three attention kernels, as a table and as a picture.

./run python examples/attention_kernels.py                       # GPT-2's smallest, B=4; writes attention_kernels.svg
./run python examples/attention_kernels.py --batch 8 --out a.svg

Each kernel is traced once; its formula gives every length. The picture is drawn with matplotlib where it is installed, and else
written as SVG by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import memir
from memir.api import wide_step
from memir.derivation.derive import Derivation
from memir.derivation.layout import plain_style, size_text
from memir.derivation.step import shown

KERNELS = {"flash": "#1b6ca8", "efficient": "#d1495b", "eager": "#5b8c5a"}
GIB = 2**30
Curve = list[tuple[int, float]]  # (S, GiB)


def main() -> None:
    """Print what a layer keeps under each kernel, the table, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="gpt2")
    parser.add_argument("--batch", type=int, default=4, metavar="B")
    parser.add_argument("--longest", type=int, default=8192, metavar="S", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("attention_kernels.svg"), metavar="FILE")
    options = parser.parse_args()
    lengths = [options.longest * k // 16 for k in range(1, 17)]
    curves: dict[str, Curve] = {}
    for kernel in KERNELS:
        over = shown(wide_step(options.target, memir.Recipe(attention=kernel)))
        derivation = Derivation(over)
        (layer,) = derivation.quantity("layer").parts
        print(f"{kernel:10} a layer keeps  {size_text(layer.size, over.env, plain_style())}")
        env = {**over.env, "B": options.batch, "P": options.longest}  # positions for the longest
        parts = derivation.quantity("peak").parts
        curves[kernel] = [(s, max(part.size.evaluate({**env, "S": s}) for part in parts) / GIB) for s in lengths]
    print(table(curves))
    draw(curves, f"{options.target}, B={options.batch}: peak of a training step", options.out)
    print(f"wrote {options.out}")


def table(curves: dict[str, Curve]) -> str:
    """A line for each length, GiB for each kernel."""
    lines = [f"{'S':>8}" + "".join(f"{kernel:>12}" for kernel in curves)]
    rows = zip(*curves.values(), strict=True)
    lines += [f"{row[0][0]:>8,}" + "".join(f"{gib:>12.2f}" for _, gib in row) for row in rows]
    return "\n".join(lines)


def draw(curves: dict[str, Curve], title: str, out: Path) -> None:
    """The picture, by matplotlib or by hand."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        out.write_text(svg(curves, title))
        return
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for kernel, points in curves.items():
        axes.plot([s for s, _ in points], [gib for _, gib in points], color=KERNELS[kernel], label=kernel)
    axes.set(title=title, xlabel="tokens in a sequence, S", ylabel="GiB")
    axes.legend()
    figure.savefig(out)


def svg(curves: dict[str, Curve], title: str, width: int = 640, height: int = 400, margin: int = 56) -> str:
    """The same picture in plain SVG."""
    right = max(s for points in curves.values() for s, _ in points)
    top = max(gib for points in curves.values() for _, gib in points)

    def place(s: float, gib: float) -> tuple[float, float]:
        return margin + (width - 2 * margin) * s / right, height - margin - (height - 2 * margin) * gib / top

    def text(x: float, y: float, words: str, anchor: str = "middle", color: str = "#222") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'

    parts = [text(width / 2, margin / 2, title), text(width / 2, height - 12, "tokens in a sequence, S")]
    for k in range(5):
        (x, bottom), (left, y) = place(right * k / 4, 0), place(0, top * k / 4)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{width - margin}" stroke="#ddd"/>')
        parts += [text(x, bottom + 18, f"{right * k // 4:,}"), text(left - 8, y + 4, f"{top * k / 4:.0f} GiB", "end")]
    for number, (kernel, points) in enumerate(curves.items()):
        parts.append(f'<polyline fill="none" stroke="{KERNELS[kernel]}" stroke-width="2" points="{_line(points, place)}"/>')
        parts.append(text(margin + 12, margin + 18 * number, kernel, "start", KERNELS[kernel]))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _line(points: Curve, place: Callable[[float, float], tuple[float, float]]) -> str:
    return " ".join("{:.1f},{:.1f}".format(*place(s, gib)) for s, gib in points)


if __name__ == "__main__":
    main()
