"""Habits of model code that cost memory, found in a step's program, each with what leaving it would give back."""
