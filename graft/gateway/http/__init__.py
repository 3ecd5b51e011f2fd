"""The HTTP side of the gateway: who may ask (`rules`), one request (`caller`), what it gets (`app`)."""
