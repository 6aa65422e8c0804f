"""memir from Python: what a step takes, how it grows, and what of it fits, for the GPT in examples/gpt.py.

./run python examples/api.py
"""

from __future__ import annotations

from pathlib import Path

import memir

MODEL = str(Path(__file__).with_name("gpt.py"))
SMALL = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1000}  # as --set on the command line
GIB = 2**30


def main() -> None:
    """Print a few answers about one training step."""
    # What `memir analyze examples/gpt.py -b 8 -s 512 --set ...` prints, as plain data.
    report = memir.analyze(MODEL, batch=8, seq=512, sets=SMALL)
    print(
        f"peak           {report.peak.requested:>12,} bytes, in {report.spot.phase} at {report.spot.op} ({report.spot.source})"
    )
    print(f"between steps  {report.steady.requested:>12,} bytes")
    for kind, nbytes in report.breakdown:
        if nbytes:
            print(f"  {kind:16} {nbytes:>10,}")

    # The same step with every layer checkpointed, as a memory program. One trace answers for every B and S.
    traced = memir.trace(MODEL, memir.Recipe(checkpoint="full"), batch=8, seq=512, sets=SMALL)
    peak = memir.peak(traced.program)
    for piece in peak.total.pieces:
        print(f"peak is at least {piece.size} bytes  ({piece.place.phase}, {piece.place.opcode})")
    fits = [batch for batch in range(2, 1025) if peak.evaluate({"B": batch, "S": 512})[0] <= GIB]
    print(f"largest batch within 1 GiB at S=512: {max(fits)}")

    # Programs are data: they print, and read back.
    text = memir.to_text(traced.program)
    print(f"{len(text.splitlines()):,} lines of memory program, read back: {memir.parse(text) == traced.program}")

    # Errors say what is wrong, where, and what to do, and know the command line's exit code.
    try:
        memir.analyze(MODEL, memir.Recipe(optimizer="adamm"))
    except memir.UsageError as error:
        print(f"exit code {error.exit_code}: {error.message}")


if __name__ == "__main__":
    main()
