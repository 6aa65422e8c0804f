"""Every cut of a model at once: what freezing the first k layers leaves to train, takes at the peak, and how fast it is.

The step is rewritten a few times at small depths and lifted over the depth and the cut (`memir.rewrite.lift`): one program for
the middle cuts, in which k is a symbol, and one for each cut near an end. All numbers are values of their polynomials.
"""

from memir.cuts.plan import Plan, plan
from memir.cuts.reading import Cut

__all__ = ["Cut", "Plan", "plan"]
