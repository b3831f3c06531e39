"""Measurements of a running deployment: timelines, views, counters."""
