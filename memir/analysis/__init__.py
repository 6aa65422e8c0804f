"""What is computed from a program, read only: live bytes, the peak, FLOPs and cost."""
