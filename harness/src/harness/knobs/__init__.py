"""What a YAML file or a key of one word adds to a run: averaged weights, schedules, speed."""
