"""Questions about an invented town that take several searches and a multiplication."""
