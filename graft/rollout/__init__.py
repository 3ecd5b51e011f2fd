"""From tasks to episodes: environments and engines meet here. Read `live_trajectory.py` first."""
