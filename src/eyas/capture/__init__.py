"""The capture stage: tokens in, hidden states in the store."""
