"""The files of a run: its folder, checkpoints, metrics, episodes and records; read `folder` first."""
