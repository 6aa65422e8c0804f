"""Freezing a growing prefix of layers while fine-tuning, and caching its activations; `memir.freezing` has the public names."""
