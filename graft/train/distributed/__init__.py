"""Runs of several processes under torchrun; read `process_group` first."""
