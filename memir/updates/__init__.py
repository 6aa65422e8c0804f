"""What optimizers do in a step, operator by operator, and what they keep: descriptions without torch."""
