"""From files of conversations to one token set: token ids, loss masks, and an account of every record."""
