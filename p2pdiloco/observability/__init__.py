"""Views of a run for people: one snapshot, shown by page, terminal view, metrics and alerts."""
