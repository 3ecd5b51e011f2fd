"""Teachers of a policy: which one scores a row, what it reads, and where it runs (docs/distillation.md)."""
