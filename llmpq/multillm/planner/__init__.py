"""Planning of applications of several models: methods, bounds, schedules."""
