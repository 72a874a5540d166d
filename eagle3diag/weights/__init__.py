"""The weights room."""
