"""Everything that can be known to fail later, checked now."""
