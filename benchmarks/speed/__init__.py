"""How long memir takes and how much memory: whole processes, side by side with what they can be compared with.

`python -m benchmarks.speed` runs every case in turn, several times, and prints the table and whether each aim is met; `--save`
also writes results.json and results.md.
"""
