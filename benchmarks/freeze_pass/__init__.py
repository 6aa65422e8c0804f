"""The pass freeze against real training steps on the CPU: many architectures, frozen up to each of five cuts.

`python -m benchmarks.freeze_pass` runs and predicts every case, prints the table and writes `results.csv`.
"""
