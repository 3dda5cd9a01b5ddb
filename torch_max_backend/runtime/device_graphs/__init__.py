"""Replaying a launch list as a device graph."""
