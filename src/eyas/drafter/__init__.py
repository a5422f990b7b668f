"""The drafter: model, alignment, training-time test, draft vocabulary, and the walk that measures acceptance."""
