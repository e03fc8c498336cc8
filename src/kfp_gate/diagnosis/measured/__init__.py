"""What a run's timelines say in numbers; judges nothing."""
