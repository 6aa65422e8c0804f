"""A step over its model's widths too: the same code traced at several, each size generalized, the whole verified."""
