"""The engines room."""
