"""Predicted tokens per second beside published ones."""
