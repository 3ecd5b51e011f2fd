"""Training on a Ray cluster: learners, workers that sample, and the way of the weights."""
