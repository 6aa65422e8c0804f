"""Published measurements of real GPUs beside memir's predictions: which configuration, predicted, measured, error, and why."""
