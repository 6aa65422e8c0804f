"""`memir plan`: which distributed method, micro-batch and checkpointing is the fastest of those that fit."""
