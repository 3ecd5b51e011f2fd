"""Where an episode forks: at the prompt, where the policy is unsure, in the past of failed attempts."""
