"""Tensor parallelism: which matrix products are split how, read off the graph, and one rank's program made of it. No torch."""
