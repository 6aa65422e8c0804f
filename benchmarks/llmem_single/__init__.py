"""LLMem's four single-GPU measurements beside memir's largest batch under LLMem's recipe."""
