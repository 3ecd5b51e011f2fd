"""Models of families without a decoder of ours, trained as transformers computes them."""
