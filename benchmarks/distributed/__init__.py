"""Distributed methods of PyTorch's run for real on CPU ranks, against memir's passes."""
