"""Who speaks in an attempt: which conversation is the agent's, and which model answers a request."""
