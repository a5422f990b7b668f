"""Eyas raises EAGLE-3 drafters: capture, store, train, measure, export."""

__version__ = "0.1.0"
