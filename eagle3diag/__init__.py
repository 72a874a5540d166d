"""eagle3diag: why an EAGLE-3 draft is not accepted, from its files alone."""

__version__ = "0.1.0"
