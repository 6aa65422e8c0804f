"""The memory of a step as mathematics over the widths of its model: pieces, their terms, where each comes from, and as text."""
