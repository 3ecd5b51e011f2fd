"""One run as one HTML file that needs nothing else: to be sent to a colleague, or kept."""

from __future__ import annotations
