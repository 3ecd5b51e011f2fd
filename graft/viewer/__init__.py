"""A page that shows runs while they go on: curves, steps, and episodes as trees of coloured tokens."""
