"""What a person sees of a run: alarms, texts of metrics, the display, checks before the first step."""
