"""What a run reports: measurements, progress, traces."""
