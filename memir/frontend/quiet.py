"""What libraries say while a step is described is not the user's concern."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of the libraries below, also those that they log, are not the user's concern while a step is described."""
    disabled = logging.root.manager.disable  # not a logger's level: transformers sets its own when it is first imported
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
