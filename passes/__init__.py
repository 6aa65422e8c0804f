"""memir.passes: one of memir's two flat folders at the repository's root; import it by its long name only."""

if __name__ != "memir.passes":
    raise ImportError(f"import memir.passes, not {__name__}")
