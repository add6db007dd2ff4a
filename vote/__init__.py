"""The vote: what every rank puts in before a step, and what the gang makes of it."""
