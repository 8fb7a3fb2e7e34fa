"""Views of a run for people: one snapshot, shown by page, ``top``, metrics and alerts."""
