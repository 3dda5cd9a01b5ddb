"""MAX's own execution: devices, sessions, streams and threads."""
