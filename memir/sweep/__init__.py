"""Many batches, sequence lengths and recipes from few traces: a grid of peaks, and the largest batch or sequence that fits.

`grid` evaluates one program at many points, `pool` knows which program holds where, `run` makes the rows, `solve` finds the
largest size that fits, `tables` prints both.
"""
