"""A step over the widths of its model too: the same code traced at several widths, each size generalized, the whole verified."""
