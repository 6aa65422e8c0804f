"""memir: how much GPU memory a decoder language model's training step takes, and why."""

__version__ = "0.1.0"
