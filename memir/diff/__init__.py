"""Two steps compared: which storages make the difference of their peaks, and which changed line is behind it."""
