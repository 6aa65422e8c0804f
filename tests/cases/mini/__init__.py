"""A package in the way of minGPT: a configuration node with open fields, and a table of sizes."""
