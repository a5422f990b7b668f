"""What a run showed, for people: one HTML page and the table that `eyas run` ends with."""
