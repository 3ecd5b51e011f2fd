"""The base class of environments for several agents, and the view of one seat. Start in base.py."""
