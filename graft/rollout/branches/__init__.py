"""The forks of an episode: at the prompt, where the policy is unsure, in the past of failed attempts."""
