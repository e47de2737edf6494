"""What several test files share: a tiny model and dataset, batches and steps, processes to kill."""
