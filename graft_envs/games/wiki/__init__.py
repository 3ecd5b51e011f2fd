"""The wiki game: pages, servers that have them, and the game."""
