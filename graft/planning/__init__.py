"""`graft plan`: time and memory of a recipe before it runs, here (`forecast`) or on many GPUs (`planner`)."""
