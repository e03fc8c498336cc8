"""The worker that runs on every rank."""
