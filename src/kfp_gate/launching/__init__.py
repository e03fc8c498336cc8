"""Start the ranks, follow them, explain how they ended."""
