"""Agents that exist already, trained: an endpoint that they take for their model provider."""
