"""A recipe: its keys, section by section, what other trainers call them, and what is wrong with one."""
