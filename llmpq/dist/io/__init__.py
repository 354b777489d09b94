"""What a run reads and writes: jobs, prompts, results, model files."""
