"""What a person sees of a run: one description of a moment, shown by page, ``top``, metrics and alarms."""
