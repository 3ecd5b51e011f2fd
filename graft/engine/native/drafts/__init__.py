"""Drafts: tokens that were written before after the same ones, verified several at a time."""
