"""Training the drafter from the store."""
