"""CUDA memory snapshots that PyTorch recorded: read without executing anything in them, and compared with a predicted one."""
