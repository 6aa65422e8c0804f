"""PyTorch's CUDA caching allocator, simulated: what it would reserve for a sequence of allocations.

`settings` is its configuration string, `simulator` the allocator, `replay` a program's steps played through it.
"""
