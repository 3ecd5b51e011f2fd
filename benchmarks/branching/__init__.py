"""GRPO, ARPO and AEPO at the same budget of attempts."""
