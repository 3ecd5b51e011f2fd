"""The estimate of a step on many GPUs, none of which is here."""
