"""Traced programs, kept between calls: what determines one (environment, watch, manifest), which may answer (lookup), where.

docs/caching.md says what is kept and when it is used again. A hit imports neither torch nor transformers; nothing is unpickled.
"""


class CacheWarning(UserWarning):
    """The cache cannot be used as it should; the answer does not depend on it."""
