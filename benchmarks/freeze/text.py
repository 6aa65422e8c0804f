"""Text that ships with Python: the sources of its standard library to pretrain on, its language reference to fine-tune on."""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from benchmarks.freeze.setting import SEQ, VOCABULARY

SOURCE_CHARACTERS = 3_000_000
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "__pycache__"}
HELD_OUT = 5  # every fifth topic is for testing


def sources() -> list[str]:
    """Modules of the standard library by name, without tests and tables, about 3 million characters of them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    size = 0
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(library).parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        size += len(text)
        if size > SOURCE_CHARACTERS:
            break
    return texts


def topics() -> tuple[list[str], list[str]]:
    """The language reference's topics as `help()` shows them: those to train on, those to test on.

    Topics repeat and contain one another, so each paragraph counts where it comes first, and the two share none.
    """
    seen: set[str] = set()
    found = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        new = [part for part in dict.fromkeys(text.split("\n\n")) if part.strip() and part not in seen]
        seen.update(new)
        if new:
            found.append("\n\n".join(new))
    return [t for n, t in enumerate(found) if n % HELD_OUT], found[::HELD_OUT]


def tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-pair vocabulary of those texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def rows(made: Tokenizer, texts: list[str]) -> Tensor:
    """int64 [N, SEQ]: the texts one after another, cut into rows."""
    ids = [token for encoded in made.encode_batch(texts) for token in encoded.ids]
    whole = len(ids) // SEQ * SEQ
    return torch.tensor(ids[:whole]).view(-1, SEQ)
