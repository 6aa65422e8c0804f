"""Twelve training steps on the GPU of this machine: what they really take, as data, and beside memir's prediction."""
