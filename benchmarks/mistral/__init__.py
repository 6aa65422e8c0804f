"""Mistral-7B on one A100: memir's prediction beside figures that were published, each difference named."""
