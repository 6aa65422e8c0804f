"""LLMem's choice of a distributed method on four V100 beside memir's."""
