"""GPUs and links: capacity, FLOP/s, bandwidths, each with the source of its figures; and what `--gpu` says."""

from memir.hardware.cards import Card, cards
from memir.hardware.parse import UNITS, Gpu, find_card, parse_gpu

__all__ = ["UNITS", "Card", "Gpu", "cards", "find_card", "parse_gpu"]
