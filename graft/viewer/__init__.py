"""The page of `graft view` and `graft report`: curves, steps, and episodes as trees of coloured tokens."""
