"""Serving logs and metrics: what an engine printed, in one arithmetic, and whether speculation pays."""
