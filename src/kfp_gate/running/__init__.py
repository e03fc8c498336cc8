"""A pipeline run on this machine: kfp's local runner in a child process, and what the terminal shows of it."""
