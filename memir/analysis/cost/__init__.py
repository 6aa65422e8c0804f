"""How long a step takes: operators by their shapes, collectives by algorithm and topology, and how the two overlap."""

from memir.analysis.cost.roofline import Machine, seconds

__all__ = ["Machine", "seconds"]
