"""Make training data: demonstrations of environments, and good attempts of a model."""
