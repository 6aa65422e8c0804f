"""Freezing, measured: time and memory of a step by cut, and AutoFreeze with its cache beside full fine-tuning."""
