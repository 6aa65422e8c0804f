"""Scenarios with budgets, their configuration, the baseline, and what a check says of them."""
