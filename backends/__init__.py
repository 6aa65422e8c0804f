"""memir.backends: one of memir's two flat folders at the repository's root; import it by its long name only."""

if __name__ != "memir.backends":
    raise ImportError(f"import memir.backends, not {__name__}")
