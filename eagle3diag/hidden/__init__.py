"""Dump files become a ``HiddenDump``; states are captured, profiled, compared and checked."""
