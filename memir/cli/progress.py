"""A status line on stderr for work that takes longer than a second; stdout is never touched."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, TextIO

FRAMES = "|/-\\"
PATIENCE = 1.0  # seconds without a word


class Progress:
    """Says what memir is doing, from the second second on.

    On a terminal one line is redrawn and removed at the end. Elsewhere (when asked for) each stage that starts or still runs
    after the first second is one line. `enabled=None` means: only on a terminal.
    """

    def __init__(self, stream: TextIO, enabled: bool | None = None) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._enabled = self._terminal if enabled is None else enabled
        self._text = ""
        self._said = ""
        self._drawn = False
        self._start = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def stage(self, text: str) -> None:
        """What is being done from now on: `tracing gpt2`."""
        self._text = text

    def __enter__(self) -> Self:
        if self._enabled:
            self._start = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="memir-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            if self._drawn:
                self._write("\r\x1b[K")

    def _run(self) -> None:
        frame = 0
        wait = PATIENCE
        while not self._stop.wait(wait):
            wait = 0.1
            if not self._text:
                continue
            if self._terminal:
                self._write(f"\r\x1b[K{FRAMES[frame % len(FRAMES)]} {self._text} ({time.monotonic() - self._start:.0f} s)")
                self._drawn = True
                frame += 1
            elif self._text != self._said:
                self._said = self._text
                self._write(f"{self._text} ...\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody listens any more; the work goes on
            self._stop.set()
