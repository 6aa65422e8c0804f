"""What `check`, `diff` and `lint` have to say about a line of code, and the formats for it that services read."""
