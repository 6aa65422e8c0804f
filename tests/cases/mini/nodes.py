"""A configuration node: attributes that anybody may set."""


class Node:
    """Holds attributes."""

    def merge(self, values: dict) -> None:
        self.__dict__.update(values)
