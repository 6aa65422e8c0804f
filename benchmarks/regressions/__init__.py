"""Real kinds of mistakes and improvements in model code: what `memir diff` says beside two real runs."""
