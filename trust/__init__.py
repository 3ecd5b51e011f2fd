"""Measured trust: banks of hostile programs, outputs, files, secrets, process deaths and a long run.

`make trust` runs every bank with a small count and prints one table; `ARGS=--full` runs the counts of
docs/security.md. A bank is a module of this package with `SMALL`, `FULL` (counts) and `run(count, seed)`.
"""
