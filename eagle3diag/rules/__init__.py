"""A ``Case`` becomes a ``Report``: the registry, one module or more a family, and the pages written from their docstrings."""
