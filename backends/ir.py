"""The program's own text form; with `live`, after each operator what is live then and how many bytes that is.

    %h: bf16[B, S, 64] in $h = aten.mm(%x, %w) frees $x
    # after: 128*B*S + 8192 bytes: $w $h

The added lines are comments, so the output parses back to the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TextIO

from memir.analysis.liveness import Timeline, flatten, timeline
from memir.ir.core import Program
from memir.ir.cursor import name as storage_name
from memir.ir.cursor import word
from memir.ir.printer import Printer, to_text


@dataclass(frozen=True, slots=True)
class Ir:
    """`live` adds the live storages and bytes, at most `names` of them a line, 0 for all; Repeats are unrolled for it."""

    name: ClassVar[str] = "ir"
    live: bool = False
    names: int = 12

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the text. With `live` the errors are those of `timeline`."""
        if not self.live:
            out.write(to_text(program))
            return
        for line in self._lines(flatten(program)):
            out.write(line + "\n")

    def _lines(self, program: Program) -> Iterator[str]:
        line = timeline(program)
        printer = Printer(program.dims)
        yield from printer.program(replace(program, phases=()))
        resident = {s.name for s in program.storages if s.live_in and s.live_out and s.device == "gpu"}
        alive = dict.fromkeys(s.name for s in program.storages if s.live_in and s.device == "gpu")
        if resident:
            yield f"# resident, in every line below: {len(resident)} storages"
        yield f"# start: {self._live(line, line.start, alive, resident, printer)}"
        position = 0
        for phase in program.phases:
            yield f"phase {word(phase.name)}"
            for _ in phase.ops:
                step = line.steps[position]
                yield f"  {printer.op(step.op)}"
                alive.update(dict.fromkeys(step.allocates))
                if line.running[position] != line.after[position]:
                    yield f"    # while: {printer.size(line.size(line.running[position]))} bytes"
                for name in step.frees:
                    del alive[name]
                yield f"    # after: {self._live(line, line.after[position], alive, resident, printer)}"
                position += 1

    def _live(self, line: Timeline, point: int, alive: Iterable[str], resident: set[str], printer: Printer) -> str:
        names = [f"${storage_name(name)}" for name in alive if name not in resident]
        more = f" and {len(names) - self.names} more" if self.names and len(names) > self.names else ""
        shown = names[-self.names :] if more else names  # the youngest
        return f"{printer.size(line.size(point))} bytes: {' '.join(shown) or 'resident only'}{more}"
