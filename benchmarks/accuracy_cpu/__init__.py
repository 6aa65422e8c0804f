"""Predicted against measured: real training steps of many architectures and recipes on the CPU, in absolute bytes.

`python -m benchmarks.accuracy_cpu` predicts every case, compares it with `measured.csv` and writes `results.csv`;
`--measure` runs the cases for real first and writes `measured.csv`.
"""
