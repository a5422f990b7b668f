"""The store of hidden states. The format is described in docs/format.md."""
