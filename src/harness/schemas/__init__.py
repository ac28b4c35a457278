"""JSON schemas of conf/: what an editor completes, explains and underlines keys with."""
