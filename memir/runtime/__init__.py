"""What runs beside a real training: measuring a step, and comparing it with what was predicted. Imports torch."""
