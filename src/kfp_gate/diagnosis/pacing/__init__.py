"""What sets the pace of a step, and what an epoch would take if one thing were different."""
