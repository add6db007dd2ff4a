"""The engine of one rank: sequences, block pool, scheduler, model runner, and the process around them."""
