"""What a process records of itself: timeline, phases, memory, sampler."""
