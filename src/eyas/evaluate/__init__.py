"""Measuring acceptance: replay from the store, and reference speculative decoding in process."""
