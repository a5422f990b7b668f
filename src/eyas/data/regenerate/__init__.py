"""Answers written by the target itself, through the servers that run it.

A drafter must learn what the target says, not what another model said. `regenerate` is a stage of its own, and the
first: prompts come from [[data.sources]], the target writes every answer, and `prepare` reads what came of each source
in that source's place (`Run.data`), with the source's name, weight, budget and split. It stands before `prepare`
because only so may a source hold prompts without answers, and because duplicates, near-duplicates, lengths and budgets
are then counted on the answers that are trained on. Recipes without `regenerate.servers` skip it.

Token ids go in and token ids come out: Eyas renders the chat template itself, and what a server emitted stands in the
sample as it is, never decoded and encoded again.
"""
