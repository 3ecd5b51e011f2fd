"""The forms in which agents ask their model provider, to and from `AgentRequest` and `PolicyAnswer`."""
