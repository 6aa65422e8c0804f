"""`python -m memir` is the command `memir`."""

from memir.cli import main

main()
