"""The attempts of a run: their engine, who makes them, and how steps take them."""
