"""Which claims hold, measured: a script per claim, whose results are appended to results.jsonl beside it."""
