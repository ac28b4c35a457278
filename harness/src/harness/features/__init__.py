"""Optional features of a run that a config switches on: averaged weights, schedules, speed."""
